"""The search for the environment that holds a lock, and the check of its content against the lock.

    FOLDER/NAME/bin/python    NAME is the lane of the lock, or the name of its file; `make .envs/NAME/.ready` makes it
    FOLDER/../.venv           for the lane `dev`

The name of an environment is no proof of its content, so a process of its interpreter lists the installed distributions.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from megacpp_overlays import json_text
from megacpp_overlays.errors import LockError
from megacpp_overlays.upkeep.locks import ANY, Lock, same_version

FOLDER = Path(".envs")

_ASK = """
import importlib.metadata, json, os, platform, sys
found = [(each.metadata["Name"], each.version) for each in importlib.metadata.distributions()]
here = sys.implementation.version
markers = {
    "implementation_name": sys.implementation.name,
    "implementation_version": "%d.%d.%d" % here[:3] + ("" if here[3] == "final" else "%.1s%d" % here[3:]),
    "os_name": os.name,
    "platform_machine": platform.machine(),
    "platform_python_implementation": platform.python_implementation(),
    "platform_release": platform.release(),
    "platform_system": platform.system(),
    "platform_version": platform.version(),
    "python_full_version": platform.python_version(),
    "python_version": "%d.%d" % sys.version_info[:2],
    "sys_platform": sys.platform,
}
print(json.dumps({
    "markers": markers,
    "python": platform.python_version(),
    "machine": platform.machine(),
    "system": sys.platform,
    "libc": platform.libc_ver(),
    "distributions": [pair for pair in found if all(pair)],
}))
"""
_SECONDS = 60.0
_MOST = 6
"""Maximum number of differences that are named; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter whose environment holds a lock."""

    lock: Lock
    """The lock, with the pins that apply in the environment."""
    python: Path


def of(lock: Lock, *, folder: Path | None = None, python: Path | None = None) -> Environment:
    """Return the environment that holds a lock.

    Distributions that the lock does not name are allowed, such as this project.

    Args:
        lock: the lock that the environment must hold.
        folder: the folder of environments; `.envs` below the working directory if not given.
        python: the interpreter of the environment; no search takes place then.

    Raises:
        LockError: there is no environment, or the present one differs from the lock; the message lists the differences
            and the way out.
    """
    places = [python] if python else list(dict.fromkeys(_places(lock, folder or FOLDER)))
    # without resolving links, because the path of the link identifies the environment
    places = [place.absolute() for place in places]
    there = [place for place in places if place.is_file()]
    if not there:
        looked = ", ".join(map(str, places))
        raise LockError(f"{lock.path}: no environment holds this lock: there is no {looked}; {_way_out(lock)}")
    compared = {place: compare(lock, place) for place in there}
    for place, (applying, found) in compared.items():
        if not found:
            return Environment(applying, place)
    place, (_, found) = next(iter(compared.items()))
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    raise LockError(
        f"{lock.path}: the environment of {place} differs from this lock: {'; '.join(found[:_MOST])}{more}; "
        f"{_way_out(lock)}"
    )


def compare(lock: Lock, python: Path) -> tuple[Lock, list[str]]:
    """Return the lock with the pins that apply in an environment, and the differences of the environment from it."""
    try:
        facts = _ask(python)
    except subprocess.TimeoutExpired:
        return lock, [f"it does not list its distributions within {_SECONDS:g} seconds"]
    except (OSError, ValueError) as error:
        return lock, [f"it does not list its distributions: {error}"]
    try:
        lock = lock.within(facts["markers"])
    except LockError as error:
        return lock, [str(error)]
    held: dict[str, set[str]] = {}
    for name, version in facts["distributions"]:
        held.setdefault(canonicalize_name(name), set()).add(version)
    found = [*_of_python(lock, facts), *_of_platform(lock, facts)]
    for pin in lock.pins.values():
        versions = held.get(pin.name, set())
        if not versions:
            found.append(f"{pin.name} {pin.version} is not installed")
        elif not all(same_version(version, pin.version) for version in versions):
            found.append(f"{pin.name} is {' and '.join(sorted(versions))}, not {pin.version}")
    return lock, found


def _places(lock: Lock, folder: Path) -> Iterator[Path]:
    for name in (lock.lane, lock.path.stem):
        yield folder / name / "bin" / "python"
        if name == "dev":
            yield folder.parent / ".venv" / "bin" / "python"


def _way_out(lock: Lock) -> str:
    made = f"`make .envs/{lock.path.stem}/.ready` makes one from locks/"
    return f"{made}, elsewhere `uv venv` and `uv pip sync --require-hashes {lock.path}`; or name an interpreter"


def _ask(python: Path) -> Mapping[str, Any]:
    command = [str(python), "-I", "-c", _ASK]
    done = subprocess.run(  # noqa: S603 - the interpreter that the user named
        command, capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    if done.returncode:
        raise OSError(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    facts: Mapping[str, Any] = json_text.parse(done.stdout)
    return facts


def _of_python(lock: Lock, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the difference of the Python from the lock's Python; a lock for any platform allows newer versions."""
    here: str = facts["python"]
    if lock.python is None:
        return
    if lock.platform == ANY:
        if not _reaches(here, lock.python):
            yield f"its Python is {here}, older than {lock.python}"
    elif not f"{here}.".startswith(f"{lock.python}."):
        yield f"its Python is {here}, not {lock.python}"


def _of_platform(lock: Lock, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences in machine, system and glibc from a platform such as `x86_64-manylinux_2_28`."""
    if lock.platform in {None, ANY}:
        return
    machine, _, system = lock.platform.partition("-")
    if facts["machine"] != machine:
        yield f"its machine is {facts['machine']}, not {machine}"
    if "linux" in system and facts["system"] != "linux":
        yield f"its system is {facts['system']}, not Linux"
    name, libc = facts["libc"]
    if (wanted := re.search(r"manylinux_(\d+)_(\d+)", system)) and name == "glibc":
        here = [int(number) for number in libc.split(".")[:2]]
        if here < [int(number) for number in wanted.groups()]:
            yield f"its glibc is {libc}, older than {'.'.join(wanted.groups())}"


def _reaches(python: str, oldest: str) -> bool:
    try:
        return Version(python.rstrip("+")) >= Version(oldest)  # a build between two releases ends with a plus
    except InvalidVersion:
        return False
