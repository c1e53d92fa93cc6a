"""Record of the last green runs of `make test-all`: tests/full-run.json.

full_run.py show                             print it, and how many commits came since
full_run.py record tests --junit FILE        write that all tests passed, from the report of a run that ended now
full_run.py record mutants|faults            write that this part passed, right after it has

`make test` prints it, because it does not run tests that are marked `full`; `make test-all` writes it, part by part. A run counts for the
commit that is checked out, so nothing may be edited but the record itself.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "full-run.json"
PARTS = ("tests", "mutants", "faults")


def main() -> int:
    """Show the record, or write a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="do", required=True)
    commands.add_parser("show")
    record = commands.add_parser("record")
    record.add_argument("part", choices=PARTS)
    record.add_argument("--junit", type=Path, help="the report of pytest, --junitxml")
    given = parser.parse_args()
    if given.do == "record":
        if (given.junit is None) is (given.part == "tests"):
            record.error("`tests` needs --junit FILE, and nothing else has it")
        try:
            found = {**commit(), **(counts(given.junit) if given.junit else {})}
        except ValueError as error:
            print(f"no record is written: {error}", file=sys.stderr)
            return 1
        parts = {**read(RECORD), given.part: found}
        RECORD.write_text(json.dumps({part: parts[part] for part in PARTS if part in parts}, indent=2) + "\n")
    print(*shown(read(RECORD)), sep="\n")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return the record by part; empty where there is none."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def commit() -> dict[str, Any]:
    """Return which commit is checked out, the date and the host.

    Raises:
        ValueError: the checkout has uncommitted changes.
    """
    edited = [line[3:] for line in _git("status", "--porcelain").splitlines()]
    if others := [path for path in edited if path != str(RECORD.relative_to(ROOT))]:
        raise ValueError(f"{', '.join(others[:5])} is not committed, so the run is of no commit")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "date": f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}",
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def counts(junit: Path) -> dict[str, int]:
    """Return how many tests passed and were skipped, and the minutes that they took.

    Args:
        junit: the report of pytest.

    Raises:
        ValueError: a test failed, or none ran.
    """
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))  # noqa: S314 - pytest wrote it a moment ago
    number = {
        name: sum(int(each.get(name, 0)) for each in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    if number["failures"] or number["errors"] or not number["tests"]:
        raise ValueError(f"{number['failures']} tests failed and {number['errors']} had errors, of {number['tests']}")
    return {
        "passed": number["tests"] - number["skipped"],
        "skipped": number["skipped"],
        "minutes": round(sum(float(each.get("time", 0)) for each in suites) / 60),
    }


def shown(record: dict[str, Any]) -> list[str]:
    """Return the record as a line for each part."""
    return [f"make test-all, {part}: {_last_green(record.get(part))}" for part in PARTS]


def _last_green(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no green run is recorded"
    since = _git("rev-list", "--count", f"{found['commit']}..HEAD", check=False)
    age = f"{since} commits ago" if since else "which this clone does not have"
    summary = (
        f"; {found['passed']} passed, {found['skipped']} skipped, {found['minutes']} min" if "passed" in found else ""
    )
    return f"last green on {found['date']} at {found['commit'][:10]}, {age}{summary}; {found['host']}"


def _git(*words: str, check: bool = True) -> str:
    git = shutil.which("git") or "git"
    done = subprocess.run([git, *words], cwd=ROOT, capture_output=True, text=True, check=check)
    return done.stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())
