"""Compile locks from lanes, and refuse a lock that does not match its lane.

    lock.py write [--upgrade] NAME...    compile locks/NAME.in into locks/NAME.txt, with hashes
    lock.py check LOCK...                exit 1 unless each LOCK matches its lane and this machine

A lane is a file locks/NAME.in. Its head is the metadata:

    # lane: current
    # python: 3.12
    # platform: x86_64-manylinux_2_28    or `any`: one lock for every platform, from this Python on
    # options: ...                       more for `uv pip compile`

`write` gives the lock the same head, with a digest of its inputs. `check` needs only Python, because it runs before an
environment is made: a lane and a lock that disagree must fail before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METADATA = re.compile(r"# (lane|python|platform|options|inputs): (.+)")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
EXACT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s#;*]+)\s*(?:#.*)?$", re.MULTILINE)
SECTIONS = ("[project]", "[project.optional-dependencies]", "[dependency-groups]")
COMPILE = (
    "--quiet",
    "--generate-hashes",
    "--no-header",
    "--no-annotate",
    "--no-emit-index-url",
    "--no-emit-find-links",
)


def metadata(path: Path) -> dict[str, str]:
    """Return the head of a lane or of a lock."""
    return {match[1]: match[2].strip() for line in _head(path) if (match := METADATA.fullmatch(line))}


def _head(path: Path) -> list[str]:
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line)
    return lines


def inputs(lane: Path) -> str:
    """Return the SHA-256 of all inputs of the lock of a lane."""
    declared = metadata(lane)
    options = declared.get("options", "")
    parts = [f"{name}: {declared.get(name, '')}" for name in ("lane", "python", "platform", "options")]
    parts += _requirements(lane)
    for constraint in re.findall(r"--constraint (\S+)", options):
        parts += [f"constraint {name}=={version}" for name, version in PIN.findall((ROOT / constraint).read_text())]
    for override in re.findall(r"--override (\S+)", options):
        parts += [f"override {each}" for each in _requirements(ROOT / override)]
    if "pyproject.toml" in options:
        parts += _project()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _requirements(path: Path) -> list[str]:
    """Return the requirements of a file and of the files that it includes, without comments."""
    found: list[str] = []
    for line in path.read_text().splitlines():
        bare = re.sub(r"(^|\s)#.*", "", line).strip()
        if include := re.fullmatch(r"-r (\S+)", bare):
            found += _requirements(path.parent / include[1])
        elif bare:
            found.append(bare)
    return found


def _project() -> list[str]:
    """Return the dependencies that pyproject.toml declares, as text: not every Python that runs this reads TOML."""
    text = (ROOT / "pyproject.toml").read_text()
    tables = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    chosen = [table for table in tables if table.startswith(SECTIONS)]
    lists = [match for table in chosen for match in re.findall(r"^[\w-]+ = \[.*?^\]", table, re.MULTILINE | re.DOTALL)]
    return [re.sub(r"\s+", " ", re.sub(r"#.*", "", each)) for each in lists]


def problems(lock: Path) -> list[str]:
    """Return the reasons against a lock: differences from its lane, or from this machine."""
    lane = lock.with_suffix(".in")
    if not lane.is_file():
        return [f"there is no {_name(lane)}, so the purpose of this lock is not known"]
    if not lock.is_file():
        return ["there is no such lock: run `make lock`"]
    declared, kept = metadata(lane), metadata(lock)
    found = []
    if declared.get("lane") != lane.stem:
        found.append(f"{_name(lane)} calls itself {declared.get('lane', 'nothing')}")
    found += [
        f"its {name} is {kept.get(name, 'not declared')}, and {_name(lane)} says {declared.get(name, 'nothing')}"
        for name in ("lane", "python", "platform")
        if kept.get(name) != declared.get(name)
    ]
    if kept.get("inputs") != inputs(lane):
        found.append(f"{_name(lane)}, or a file that it includes, has changed since this lock was made")
    text = lock.read_text()
    pins = {_canonical(name): version for name, version in PIN.findall(text)}
    for name, version in EXACT.findall("\n".join(_requirements(lane))):
        if pins.get(_canonical(name)) != version:
            found.append(f"{_name(lane)} wants {name} {version}, the lock has {pins.get(_canonical(name), 'none')}")
    found += [f"{each} has no hash" for each in _without_hash(text)]
    if found:
        return [*found, "run `make lock`, and review its changes"]
    return _machine_problems(declared)


def _without_hash(text: str) -> list[str]:
    requirements = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    return [each.split()[0] for each in requirements if "--hash=sha256:" not in each]


def _machine_problems(declared: dict[str, str]) -> list[str]:
    wanted = declared.get("platform", "any")
    here = f"{platform.machine()} {platform.system()}"
    if wanted != "any" and (platform.system() != "Linux" or not wanted.startswith(platform.machine())):
        return [f"it is for {wanted}, and this machine is {here}: its hashes would not match"]
    return []


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def write(name: str, *, upgrade: bool) -> None:
    """Compile one lock; replace the old one when the new one is complete."""
    lane, lock = ROOT / "locks" / f"{name}.in", ROOT / "locks" / f"{name}.txt"
    declared = metadata(lane)
    if missing := [each for each in ("lane", "python", "platform") if each not in declared]:
        sys.exit(f"error: {_name(lane)} does not say its {', '.join(missing)}")
    version = declared["python"]
    target = ["--universal"] if declared["platform"] == "any" else ["--python-platform", declared["platform"]]
    uv = _run(ROOT / "scripts/uv.sh")
    python = _run(ROOT / "scripts/python.sh", "3.12", "--fetch")
    print(f"== {_name(lock)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder, lock.name)
        if lock.exists():
            draft.write_text(lock.read_text())  # uv keeps the versions in it where they still fit
        command = [uv, "pip", "compile", *COMPILE, "--python", python, "--python-version", version, *target]
        command += ["--upgrade"] if upgrade else []
        command += [*shlex.split(declared.get("options", "")), str(lane.relative_to(ROOT)), "--output-file", str(draft)]
        subprocess.run(command, cwd=ROOT, check=True)
        head = [f"# {each}: {declared[each]}" for each in ("lane", "python", "platform")]
        body = [line for line in draft.read_text().splitlines() if not METADATA.fullmatch(line)]
        complete = lock.with_name(f".{lock.name}.{os.getpid()}")
        complete.write_text("\n".join([*head, f"# inputs: {inputs(lane)}", *body]) + "\n")
        complete.replace(lock)


def _run(*command: object) -> str:
    done = subprocess.run([str(each) for each in command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def main() -> int:
    """Run one command; return 1 if a lock is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("write", help="compile locks")
    making.add_argument("names", nargs="+", metavar="NAME")
    making.add_argument("--upgrade", action="store_true", help="take the newest versions that the lane allows")
    checking = commands.add_parser("check", help="refuse locks that do not match their lane")
    checking.add_argument("locks", nargs="+", metavar="LOCK", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "write":
        for name in chosen.names:
            write(name, upgrade=chosen.upgrade)
        return 0
    wrong = [(lock, found) for lock in chosen.locks if (found := problems(lock.resolve()))]
    for lock, found in wrong:
        print(f"error: {lock}: {'; '.join(found)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
