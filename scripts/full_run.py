"""Record of the last green run of all tests: tests/full-run.json.

full_run.py show                       print it, and how many commits came since
full_run.py record --junit FILE        write it, from the report of a run that ended now

`make test` prints it, because it does not run what is marked `full`; `make test-all` writes it. A run counts for the commit
that is checked out, so nothing may be edited but the record itself.
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


def main() -> int:
    """Show the record, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["show", "record"])
    parser.add_argument("--junit", type=Path, help="the report of pytest, --junitxml")
    given = parser.parse_args()
    if given.do == "show":
        print(shown(RECORD))
        return 0
    if given.junit is None:
        parser.error("record needs --junit FILE")
    try:
        found = recorded(given.junit)
    except ValueError as error:
        print(f"no record is written: {error}", file=sys.stderr)
        return 1
    RECORD.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(shown(RECORD))
    return 0


def recorded(junit: Path) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        junit: the report of pytest.

    Raises:
        ValueError: a test failed, or what ran is not what is committed.
    """
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))  # noqa: S314 - pytest wrote it a moment ago
    number = {
        name: sum(int(each.get(name, 0)) for each in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    if number["failures"] or number["errors"] or not number["tests"]:
        raise ValueError(f"{number['failures']} tests failed and {number['errors']} had errors, of {number['tests']}")
    edited = [line[3:] for line in _git("status", "--porcelain").splitlines()]
    if others := [path for path in edited if path != str(RECORD.relative_to(ROOT))]:
        raise ValueError(f"{', '.join(others[:5])} is not committed, so the run is of no commit")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "date": f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}",
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "passed": number["tests"] - number["skipped"],
        "skipped": number["skipped"],
        "minutes": round(sum(float(each.get("time", 0)) for each in suites) / 60),
    }


def shown(record: Path) -> str:
    """Return the record as a line."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "all tests (make test-all): no green run is recorded"
    since = _git("rev-list", "--count", f"{found['commit']}..HEAD", check=False)
    age = f"{since} commits ago" if since else "which this clone does not have"
    return (
        f"all tests (make test-all): last green on {found['date']} at {found['commit'][:10]}, {age}: "
        f"{found['passed']} passed, {found['skipped']} skipped, {found['minutes']} minutes, {found['host']}"
    )


def _git(*words: str, check: bool = True) -> str:
    git = shutil.which("git") or "git"
    done = subprocess.run([git, *words], cwd=ROOT, capture_output=True, text=True, check=check)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
