"""Locks of lanes: each lock fits its lane, and installs only on the machine that it is for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from megacpp_overlays.errors import LockError
from megacpp_overlays.upkeep import locks

LANES = sorted(path.stem for path in (ROOT / "locks").glob("*.in"))
SHA = "a" * 64


def check(*paths: Path, script: Path = ROOT / "scripts/lock.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, script, "check", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return the folder of a copy of the locks, which a test may damage."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/lock.py", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    return tmp_path / "locks"


def check_copy(lock: Path) -> subprocess.CompletedProcess[str]:
    return check(lock, script=lock.parent.parent / "scripts/lock.py")


def test_there_is_a_lane_of_spring_one_of_today_and_one_of_the_newest_releases() -> None:
    assert {"spring-2026", "summer-2026", "current", "newest"} <= set(LANES)


@pytest.mark.parametrize("lane", LANES)
def test_every_lock_agrees_with_its_lane(lane: str) -> None:
    done = check(ROOT / f"locks/{lane}.txt")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("lane", LANES)
def test_every_lock_names_its_lane_python_and_platform_and_hashes_every_file(lane: str) -> None:
    lock = locks.read(ROOT / f"locks/{lane}.txt")

    assert lock.lane == lane
    assert lock.python in {"3.10", "3.12"}
    assert lock.platform in {"any", "x86_64-manylinux_2_28"}
    assert all(pin.hashes for pin in lock.pins.values())


@pytest.mark.parametrize("path", sorted((ROOT / "locks").iterdir()), ids=lambda path: path.name)
def test_no_lock_names_where_its_files_come_from(path: Path) -> None:
    assert not re.search(r"://|--(extra-)?index-url|--find-links", path.read_text())


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("newest.in", "liger-kernel==0.8.5", "liger-kernel==0.8.4", "wants liger-kernel 0.8.4, the lock has 0.8.5"),
        ("newest.in", "numpy<2.4", "numpy<2.3", "newest.in, or a file that it includes, has changed"),
        ("loader.in", "wrapt>=1.16", "wrapt>=1.17", "newest.in, or a file that it includes, has changed"),
        ("newest.in", "# python: 3.12", "# python: 3.13", "its python is 3.12, and locks/newest.in says 3.13"),
        ("newest.in", "manylinux_2_28", "manylinux_2_17", "its platform is x86_64-manylinux_2_28, and"),
        ("newest.in", "# lane: newest", "# lane: latest", "locks/newest.in calls itself latest"),
        ("newest.txt", "# lane: newest", "# lane: current", "its lane is current, and locks/newest.in says newest"),
        ("newest.txt", "liger-kernel==0.8.5", "liger-kernel==0.8.4", "the lock has 0.8.4"),
        (
            "newest.txt",
            r"(?s)(?<=liger-kernel==0\.8\.5 \\\n).*?(?=markupsafe==)",
            "",
            "liger-kernel==0.8.5 has no hash",
        ),
    ],
)
def test_a_lane_and_a_lock_that_disagree_fail_fast(copy: Path, name: str, old: str, new: str, says: str) -> None:
    text = (copy / name).read_text()
    changed = re.sub(old, new, text, count=1) if old.startswith("(?s)") else text.replace(old, new, 1)
    assert changed != text
    (copy / name).write_text(changed)

    done = check_copy(copy / "newest.txt")

    assert done.returncode == 1
    assert says in done.stderr
    assert "run `make lock`, and review its changes" in done.stderr


def test_a_comment_is_no_reason_to_lock_anew(copy: Path) -> None:
    with (copy / "newest.in").open("a") as lane:
        lane.write("# a word about this lane\n")

    assert check_copy(copy / "newest.txt").returncode == 0


def test_a_lane_that_leaves_out_something_else_than_its_lock_fails_fast(copy: Path) -> None:
    left_out = copy / "bridge.overrides"
    text = "".join(line for line in left_out.read_text().splitlines(keepends=True) if not line.startswith("wandb"))
    left_out.write_text(text)

    assert "bridge.in, or a file that it includes, has changed" in check_copy(copy / "bridge.txt").stderr


def test_a_lock_for_another_machine_is_refused_before_anything_is_installed(copy: Path) -> None:
    for name in ("newest.in", "newest.txt"):
        (copy / name).write_text((copy / name).read_text().replace("x86_64-manylinux", "riscv64-manylinux"))
    make_current(copy / "newest.txt")

    done = check_copy(copy / "newest.txt")

    assert done.returncode == 1
    assert "it is for riscv64-manylinux_2_28, and this machine is" in done.stderr


def test_an_environment_is_not_touched_when_its_lane_and_lock_disagree(copy: Path) -> None:
    for script in ("environment.sh", "python.sh", "uv.sh"):
        shutil.copy(ROOT / "scripts" / script, copy.parent / "scripts")
    lane = copy / "loader.in"
    lane.write_text(lane.read_text().replace("wrapt>=1.16", "wrapt>=1.17"))

    done = subprocess.run(
        ["scripts/environment.sh", "made", "locks/loader.txt"],
        cwd=copy.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode != 0
    assert "has changed since this lock was made" in done.stderr
    assert not (copy.parent / "made").exists()


@pytest.mark.parametrize(
    ("lock", "given", "version"),
    [("newest", [], "3.14"), ("newest", ["3.13"], "3.13"), ("loader", [], "3.10"), ("loader", ["3.11"], "3.11")],
)
def test_an_environment_has_the_python_of_its_lane_unless_another_is_given(
    copy: Path, lock: str, given: list[str], version: str
) -> None:
    scripts = copy.parent / "scripts"
    shutil.copy(ROOT / "scripts/environment.sh", scripts)
    # Stand-ins for the scripts that fetch a Python and install into it: the first notes the version that it is asked for.
    write_script(scripts / "python.sh", f"echo $1 >>asked\necho {sys.executable}")
    write_script(scripts / "uv.sh", "echo true")
    change_python(copy / "newest", "3.12", "3.14")

    done = subprocess.run(
        ["scripts/environment.sh", "made", f"locks/{lock}.txt", *given],
        cwd=copy.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert (copy.parent / "asked").read_text().split()[-1] == version


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def change_python(stem: Path, old: str, new: str) -> None:
    """Change the Python of a lane and of its lock."""
    for suffix in (".in", ".txt"):
        path = stem.with_suffix(suffix)
        path.write_text(path.read_text().replace(f"# python: {old}", f"# python: {new}"))
    make_current(stem.with_suffix(".txt"))


def make_current(lock: Path) -> None:
    """Write the digest of a lane's current inputs into its lock."""
    digest = subprocess.run(
        [sys.executable, "-c", f"import lock, pathlib; print(lock.inputs(pathlib.Path('../locks/{lock.stem}.in')))"],
        cwd=lock.parent.parent / "scripts",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    lock.write_text(re.sub(r"# inputs: \w+", f"# inputs: {digest}", lock.read_text()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("liger-kernel>=0.8 --hash=sha256:" + SHA, ":1: liger-kernel is not pinned with == to one version"),
        ("liger-kernel==0.8.* --hash=sha256:" + SHA, ":1: liger-kernel is not pinned with == to one version"),
        ("# a lock\n\nliger-kernel==0.8.5\n", ":3: liger-kernel has no hash"),
        ("liger-kernel==0.8.5 --hash=md5:abc", ":1: md5:abc is no sha256 hash"),
        (f"a==1 --hash=sha256:{SHA}\nA==2 --hash=sha256:{SHA}", ":2: a is pinned twice"),
        ("-r other.txt", ":1: '-r' is no pin"),
        ("# nothing\n", "no pin in it"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.txt"
    path.write_text(text)

    with pytest.raises(LockError, match=re.escape(f"{path}") + ".*" + re.escape(says)):
        locks.read(path)


def test_a_lock_that_is_missing_or_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(LockError, match=r"none\.txt: cannot read this lock: No such file"):
        locks.read(tmp_path / "none.txt")
    with pytest.raises(LockError, match=r"binary\.txt: cannot read this lock: it is no text"):
        locks.read(tmp_path / "binary.txt")


def test_a_pin_for_another_python_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(f"a==1 ; python_version < '3' --hash=sha256:{SHA}\nb==2 --hash=sha256:{SHA}\n")

    assert list(locks.read(path).pins) == ["b"]


def test_the_pins_of_another_environment_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(
        f"a==1 ; python_version < '3' --hash=sha256:{SHA}\na==2 ; python_version >= '3' --hash=sha256:{SHA}\n"
    )
    lock = locks.read(path)

    old = lock.within({"python_version": "2.7"})

    assert (lock.version("a"), old.version("a"), old.within({}).version("a")) == ("2", "1", "2")


def test_a_lock_of_which_nothing_applies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(f"a==1 ; python_version < '3' --hash=sha256:{SHA}\n")

    with pytest.raises(LockError, match=r"x\.txt: no pin of it applies to this Python on this platform"):
        locks.read(path)


NAMES = st.from_regex(r"[a-z]{1,8}(-[a-z0-9]{1,5})?", fullmatch=True)
PINS = st.dictionaries(
    NAMES,
    st.tuples(
        st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,2}", fullmatch=True),
        st.sets(st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.unmeasured
@settings(max_examples=25)
@given(pins=PINS, comments=st.booleans())
def test_a_written_lock_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, pins: dict[str, tuple[str, set[str]]], comments: bool
) -> None:
    path = tmp_path_factory.mktemp("lock") / "lane.txt"
    lines = ["# lane: made-up", "# python: 3.12"]
    for name, (version, hashes) in pins.items():
        lines += [f"{name}=={version} \\", *(f"    --hash=sha256:{each} \\" for each in sorted(hashes))]
        lines[-1] = lines[-1].removesuffix(" \\")
        lines += ["    # via something"] if comments else []
    path.write_text("\n".join(lines) + "\n")

    lock = locks.read(path)

    assert (lock.lane, lock.python, lock.platform) == ("made-up", "3.12", None)
    assert {name: (pin.version, set(pin.hashes)) for name, pin in lock.pins.items()} == pins
    assert lock.version("Nothing_like.it") is None
