"""An environment is accepted for a lock only if its own interpreter reports the versions that the lock pins."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.markers import default_environment

from megacpp_overlays.errors import LockError
from megacpp_overlays.upkeep import environments, locks
from megacpp_overlays.upkeep.locks import Lock

HERE = Path(sys.executable)
HASH = f"--hash=sha256:{'0' * 64}"
INSTALLED = {name: importlib.metadata.version(name) for name in ("packaging", "wrapt", "pytest", "hypothesis")}


def differences(lock: Lock, python: Path) -> list[str]:
    """Return how an environment differs from a lock."""
    return environments.compare(lock, python)[1]


def write_lock(folder: Path, pins: dict[str, str], name: str = "here.txt", **head: str) -> Lock:
    lines = [f"# {key}: {value}" for key, value in head.items()]
    lines += [f"{distribution}=={version} {HASH}" for distribution, version in pins.items()]
    (folder / name).write_text("\n".join([*lines, ""]))
    return locks.read(folder / name)


def write_interpreter(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def link_interpreter(path: Path) -> Path:
    """Make an interpreter that answers as this one does: a link would be one without our packages."""
    return write_interpreter(path, f'exec {HERE} "$@"')


# The answer of an interpreter


def test_an_environment_that_holds_the_pins_may_hold_more(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, INSTALLED, python=".".join(platform.python_version_tuple()[:2]))

    found = environments.of(lock, python=HERE)

    assert (found.lock.path, found.lock.pins, found.python) == (lock.path, lock.pins, HERE)


def test_the_platform_that_a_lock_is_for_is_asked_for(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, INSTALLED, platform=f"{platform.machine()}-manylinux_2_17")

    assert environments.of(lock, python=HERE).lock.platform == lock.platform


@pytest.mark.unmeasured
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    other=st.sets(st.sampled_from(sorted(INSTALLED))), missing=st.sets(st.from_regex(r"zz-[a-z]{3,8}", fullmatch=True))
)
def test_every_distribution_that_differs_is_named_and_no_other(
    tmp_path: Path, other: set[str], missing: set[str]
) -> None:
    pins = {**{name: "0.0.1" if name in other else version for name, version in INSTALLED.items()}}
    lock = write_lock(tmp_path, {**pins, **dict.fromkeys(missing, "1.0")})

    found = differences(lock, HERE)

    assert sorted(found) == sorted(
        [f"{name} is {INSTALLED[name]}, not 0.0.1" for name in other]
        + [f"{name} 1.0 is not installed" for name in missing]
    )


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ({"python": "3.7"}, f"its Python is {platform.python_version()}, not 3.7"),
        ({"python": "3.1"}, f"its Python is {platform.python_version()}, not 3.1"),
        ({"platform": "sparc-manylinux_2_17"}, f"its machine is {platform.machine()}, not sparc"),
        ({"platform": f"{platform.machine()}-manylinux_2_999"}, "older than 2.999"),
    ],
)
def test_another_python_or_platform_is_a_difference(tmp_path: Path, head: dict[str, str], says: str) -> None:
    lock = write_lock(tmp_path, INSTALLED, **head)

    with pytest.raises(LockError, match="differs from this lock") as caught:
        environments.of(lock, python=HERE)

    assert says in str(caught.value)


def test_a_lock_for_linux_is_not_held_elsewhere(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, {"packaging": "1.0"}, platform="arm64-unknown-linux-gnu")
    facts = '{"python": "3.12.1", "machine": "arm64", "system": "darwin", "libc": ["", ""], "distributions": [], '
    facts += '"markers": {}}'
    python = write_interpreter(tmp_path / "python", f"echo '{facts}'")

    assert differences(lock, python) == [
        "its system is darwin, not Linux",
        "packaging 1.0 is not installed",
    ]


@pytest.mark.parametrize(
    ("oldest", "found"),
    [("3.7", []), ("3.10", []), ("3.999", [f"its Python is {platform.python_version()}, older than 3.999"])],
)
def test_a_lock_for_any_platform_is_held_by_every_python_from_its_own_on(
    tmp_path: Path, oldest: str, found: list[str]
) -> None:
    lock = write_lock(tmp_path, INSTALLED, python=oldest, platform="any")

    assert differences(lock, HERE) == found


@pytest.mark.parametrize(("python", "holds"), [("3.12.4+", True), ("3.10.0rc1", False), ("unknown", False)])
def test_a_python_between_two_releases_is_as_new_as_it_says(tmp_path: Path, python: str, holds: bool) -> None:
    lock = write_lock(tmp_path, {"one": "1.0"}, python="3.10", platform="any")
    facts = f'{{"python": "{python}", "distributions": [["one", "1.0"]], "markers": {{}}}}'

    found = differences(lock, write_interpreter(tmp_path / "python", f"echo '{facts}'"))

    assert found == ([] if holds else [f"its Python is {python}, older than 3.10"])


def answer(path: Path, version: str, markers: dict[str, str]) -> Path:
    """Make an interpreter of another kind, which holds one distribution."""
    facts = {"python": "3.14.1", "markers": markers, "distributions": [["one", version]]}
    return write_interpreter(path, f"echo '{json.dumps(facts)}'")


@pytest.mark.parametrize(("python_version", "pinned"), [("3.9", "1.0"), ("3.14", "2.0")])
def test_a_marker_is_about_the_interpreter_that_is_asked(tmp_path: Path, python_version: str, pinned: str) -> None:
    lock = write_lock(tmp_path, INSTALLED)
    lock.path.write_text(
        f"one==1.0 ; python_version < '3.10' {HASH}\n"
        f"one==2.0 ; python_version >= '3.10' {HASH}\n"
        f"two==1.0 ; sys_platform == 'win32' {HASH}\n"
    )
    python = answer(tmp_path / "python", pinned, {"python_version": python_version, "sys_platform": "linux"})

    found = environments.of(locks.read(lock.path), python=python)

    assert {name: pin.version for name, pin in found.lock.pins.items()} == {"one": pinned}


def test_a_distribution_that_is_pinned_twice_there_is_a_difference_there_alone(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, INSTALLED)
    lock.path.write_text(f"one==1.0 {HASH}\none==2.0 ; sys_platform == 'win32' {HASH}\n")
    lock = locks.read(lock.path)

    assert differences(lock, answer(tmp_path / "here", "1.0", {"sys_platform": "linux"})) == []
    assert differences(lock, answer(tmp_path / "there", "1.0", {"sys_platform": "win32"})) == [
        f"{lock.path}:2: one is pinned twice"
    ]


def test_an_interpreter_says_the_markers_that_packaging_would(tmp_path: Path) -> None:
    said = {name: str(value) for name, value in default_environment().items()}
    lines = [f"m{number}==1.0 ; {name} == {value!r} {HASH}" for number, (name, value) in enumerate(said.items())]
    lock = write_lock(tmp_path, INSTALLED)
    lock.path.write_text("\n".join([f"one==1.0 {HASH}", *lines, ""]))
    elsewhere = locks.read(lock.path).within(dict.fromkeys(said, "0"))

    found = differences(elsewhere, HERE)

    assert set(elsewhere.pins) == {"one"}
    assert len(found) == 1 + len(said)  # every one applies here, and none of them is installed


def test_versions_that_no_standard_knows_are_compared_as_text(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, {"old-one": "1.0"})
    facts = '{"python": "3.12.1", "distributions": [["Old_One", "2004d-final"]], "markers": {}}'
    python = write_interpreter(tmp_path / "python", f"echo '{facts}'")

    assert differences(lock, python) == ["old-one is 2004d-final, not 1.0"]


def test_many_differences_are_counted(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, {f"zz-{number}": "1.0" for number in range(9)})

    with pytest.raises(LockError, match=r"; zz-5 1\.0 is not installed and 3 more; `make \.envs/here/\.ready`"):
        environments.of(lock, python=HERE)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'no such library' >&2; exit 3", "exit code 3: no such library"),
        ("exit 3", "exit code 3: no output"),
        ("echo no JSON", "it does not list its distributions"),
        ("sleep 60", "it does not list its distributions within 0.3 seconds"),
    ],
)
def test_an_interpreter_that_gives_no_answer_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    monkeypatch.setattr(environments, "_SECONDS", 0.3)
    lock = write_lock(tmp_path, INSTALLED)
    python = write_interpreter(tmp_path / "python", f"exec {script}" if script.startswith("sleep") else script)

    with pytest.raises(LockError) as caught:
        environments.of(lock, python=python)

    assert says in str(caught.value)


# Where it is looked for


@pytest.mark.parametrize("name", ["summer", "here"])
def test_it_is_found_by_the_lane_and_by_the_name_of_the_lock(tmp_path: Path, name: str) -> None:
    lock = write_lock(tmp_path, INSTALLED, lane="summer")
    python = link_interpreter(tmp_path / "envs" / name / "bin" / "python")

    assert environments.of(lock, folder=tmp_path / "envs").python == python


def test_the_environment_of_lane_dev_is_the_one_of_the_checkout(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, INSTALLED, lane="dev")
    python = link_interpreter(tmp_path / ".venv" / "bin" / "python")

    assert environments.of(lock, folder=tmp_path / ".envs").python == python


def test_of_two_candidates_the_one_that_holds_the_lock_is_taken(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, INSTALLED, lane="summer")
    write_interpreter(tmp_path / "envs" / "summer" / "bin" / "python", "exit 1")
    python = link_interpreter(tmp_path / "envs" / "here" / "bin" / "python")

    assert environments.of(lock, folder=tmp_path / "envs").python == python


def test_without_an_environment_the_error_names_the_searched_folder_and_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lock = write_lock(tmp_path, INSTALLED, lane="summer")

    with pytest.raises(LockError) as caught:
        environments.of(lock)

    assert f"there is no {tmp_path}/.envs/summer/bin/python, {tmp_path}/.envs/here/bin/python" in str(caught.value)
    assert "`make .envs/here/.ready` makes one from locks/, elsewhere `uv venv` and `uv pip sync" in str(caught.value)


@pytest.mark.parametrize("lane", ["/tmp/elsewhere", "../../x", "..", ".hidden", "a/b"])
def test_a_lane_is_a_name_and_no_path(tmp_path: Path, lane: str) -> None:
    """Else a lock would say which interpreter runs."""
    with pytest.raises(LockError, match="is no name of a lane"):
        write_lock(tmp_path, {"made-one": "1.0"}, lane=lane)
