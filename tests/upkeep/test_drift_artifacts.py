"""An environment against its lock: the same version is not enough, it has to be the same artifact."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from drift_environments import install, installed_in, make_wheel
from hypothesis import given
from hypothesis import strategies as st

from megacpp_overlays.errors import LockError, UpkeepError
from megacpp_overlays.upkeep import locks
from megacpp_overlays.upkeep.drift import artifacts
from megacpp_overlays.upkeep.drift.artifacts import Comparison, Identity
from megacpp_overlays.upkeep.drift.records import Entry

FILES = {"lab_ops/__init__.py": "", "lab_ops/ops.py": "X = 1\n"}
SCHEMES = {
    "lab_ops-1.0.data/scripts/lab-tool": "#!python\nprint(1)\n",
    "lab_ops-1.0.data/data/bin/lab-binary": "not really compiled\n",
    "lab_ops-1.0.data/data/share/lab/page.1": "a page\n",
    "lab_ops-1.0.data/purelib/lab_ops/more.py": "Y = 1\n",
}


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact that is locked, with files in every place that a wheel may put them, and what pip makes of it."""
    folder = tmp_path_factory.mktemp("published")
    make_wheel(folder / "wheels", "lab_ops", "1.0", {**FILES, **SCHEMES})
    install(folder / "target", "lab_ops", find_links=folder / "wheels")
    return folder


@pytest.fixture
def wheels(published: Path, tmp_path: Path) -> Path:
    shutil.copytree(published / "wheels", tmp_path / "wheels")
    return tmp_path / "wheels"


@pytest.fixture
def target(published: Path, tmp_path: Path) -> Path:
    """What was installed from it, for a test to change."""
    shutil.copytree(published / "target", tmp_path / "target")
    return tmp_path / "target"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock_of(folder: Path, **pins: tuple[str, list[Path]]) -> locks.Lock:
    """Write a lock, and read it."""
    lines = [
        f"{name.replace('_', '-')}=={version} " + " ".join(f"--hash=sha256:{sha256(each)}" for each in files)
        for name, (version, files) in pins.items()
    ]
    (folder / "lane.txt").write_text("\n".join(lines) + "\n")
    return locks.read(folder / "lane.txt")


@pytest.fixture
def compare(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Comparison]:
    """Compare what is installed in a folder with the lock of the artifact."""

    def run(target: Path, *, at_hand: bool = True) -> Comparison:
        lock = lock_of(tmp_path, lab_ops=("1.0", sorted(wheels.iterdir())))
        return artifacts.compare(lock, installed_in(target, monkeypatch), [wheels] if at_hand else [])

    return run


def install_another(folder: Path, files: Mapping[str, str]) -> Path:
    """Install another artifact of the same version; return where."""
    make_wheel(folder / "mirror", "lab_ops", "1.0", files)
    install(folder / "target", "lab_ops", find_links=folder / "mirror")
    return folder / "target"


def test_what_was_installed_from_the_locked_artifact_is_as_locked(
    target: Path, compare: Callable[..., Comparison]
) -> None:
    (pin,) = compare(target).pins

    assert pin.identity is Identity.SAME
    assert pin.why == "its RECORD is that of lab_ops-1.0-py3-none-any.whl"


def test_the_same_version_with_other_content_is_another_artifact(
    tmp_path: Path, compare: Callable[..., Comparison]
) -> None:
    other = {**FILES, **SCHEMES, "lab_ops/ops.py": "X = 2\n", "lab_ops/new.py": ""}

    found = compare(install_another(tmp_path, other))

    assert [each.identity for each in found.wrong] == [Identity.OTHER]
    assert found.wrong[0].why == "lab_ops-1.0-py3-none-any.whl has other content in lab_ops/new.py, lab_ops/ops.py"


@pytest.mark.parametrize(
    "moved", ["lab_ops-1.0.data/data/share/lab/page.1", "lab_ops-1.0.data/purelib/lab_ops/more.py"]
)
def test_files_that_an_installer_moves_are_compared_too(
    tmp_path: Path, compare: Callable[..., Comparison], moved: str
) -> None:
    (pin,) = compare(install_another(tmp_path, {**FILES, **SCHEMES, moved: "other\n"})).pins

    assert pin.identity is Identity.OTHER


def test_an_edited_record_does_not_hide_an_edited_file(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of(tmp_path, lab_ops=("1.0", sorted(wheels.iterdir())))
    record = target / "lab_ops-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text().replace("lab_ops/ops.py,sha256=", "lab_ops/ops.py,sha256=A"))

    (pin,) = artifacts.compare(lock, installed_in(target, monkeypatch), [wheels]).pins

    assert pin.identity is Identity.OTHER


def test_an_artifact_that_is_not_at_hand_is_never_called_the_same(
    target: Path, compare: Callable[..., Comparison]
) -> None:
    found = compare(target, at_hand=False)

    assert [(each.identity, each.why) for each in found.pins] == [(Identity.UNKNOWN, "its artifact is not in --wheels")]
    assert found.wrong == ()


def test_a_file_with_the_right_name_and_another_hash_is_not_the_artifact(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of(tmp_path, lab_ops=("1.0", sorted(wheels.iterdir())))
    make_wheel(wheels, "lab_ops", "1.0", {**FILES, **SCHEMES}, mark="packed again")

    (pin,) = artifacts.compare(lock, installed_in(target, monkeypatch), [wheels]).pins

    assert pin.identity is Identity.UNKNOWN


def test_a_wheel_for_another_platform_says_nothing(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_wheel(tmp_path / "far", "lab_ops", "1.0", FILES, tag="cp312-cp312-win_amd64")
    lock = lock_of(tmp_path, lab_ops=("1.0", [other]))

    (pin,) = artifacts.compare(lock, installed_in(target, monkeypatch), [tmp_path / "far"]).pins

    assert (pin.identity, pin.why) == (Identity.UNKNOWN, f"{other.name} is for another platform")


def test_what_was_built_from_a_locked_source_is_not_in_the_lock(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "far" / "lab_ops-1.0.tar.gz"
    source.parent.mkdir()
    source.write_bytes(b"a source archive")
    lock = lock_of(tmp_path, lab_ops=("1.0", [source]))

    (pin,) = artifacts.compare(lock, installed_in(target, monkeypatch), [source.parent]).pins

    assert (pin.identity, "is a source" in pin.why) == (Identity.UNKNOWN, True)


def test_another_version_a_missing_pin_and_what_is_extra_are_listed(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = next(wheels.iterdir())
    lock = lock_of(tmp_path, lab_ops=("1.0.post1", [artifact]), lab_gone=("2.0", [artifact]))
    install(target, make_wheel(tmp_path / "more", "lab_more", "3.0", {"lab_more.py": ""}))
    install(target, make_wheel(tmp_path / "more", "pip", "99.0", {"pip/__init__.py": ""}))
    installed = installed_in(target, monkeypatch)

    found = artifacts.compare(lock, installed)

    assert {each.name: (each.identity, each.installed) for each in found.pins} == {
        "lab-ops": (Identity.VERSION, "1.0"),
        "lab-gone": (Identity.MISSING, None),
    }
    assert len(found.wrong) == 2
    assert found.extra == ("lab-more==3.0", "pip==99.0")
    assert list(artifacts.strangers(found)) == ["lab-more==3.0"]  # pip belongs to every environment


def test_two_spellings_of_one_version_are_one_version(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of(tmp_path, lab_ops=("1.0.0", sorted(wheels.iterdir())))

    (pin,) = artifacts.compare(lock, installed_in(target, monkeypatch), [wheels]).pins

    assert pin.identity is Identity.SAME


def test_two_locks_of_one_lane_are_one(tmp_path: Path, wheels: Path) -> None:
    artifact = next(wheels.iterdir())
    other = make_wheel(tmp_path / "other", "lab_ops", "1.0", FILES)
    first = lock_of(tmp_path, lab_ops=("1.0", [artifact]))
    second = lock_of(tmp_path, lab_ops=("1.0", [other]), lab_source=("2.0", [artifact]))

    merged = artifacts.merge([first, second])

    assert set(merged.pins) == {"lab-ops", "lab-source"}
    assert merged.pins["lab-ops"].hashes == {sha256(artifact), sha256(other)}
    with pytest.raises(LockError, match=r"it pins lab-ops 1\.1, and another lock 1\.0"):
        artifacts.merge([first, lock_of(tmp_path, lab_ops=("1.1", [artifact]))])


def test_a_version_that_no_standard_knows_is_compared_as_it_is_written(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = target / "lab_ops-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "our-build"))
    path = tmp_path / "lane.txt"
    path.write_text(f"lab-ops===our-build --hash=sha256:{sha256(next(wheels.iterdir()))}\n")

    (pin,) = artifacts.compare(locks.read(path), installed_in(target, monkeypatch)).pins

    assert pin.identity is Identity.UNKNOWN  # and not another version


@pytest.mark.parametrize(
    ("origin", "identity", "says"),
    [
        ({"dir_info": {"editable": True}}, Identity.OTHER, "which is no locked artifact"),
        ({"dir_info": {}}, Identity.OTHER, "which is no locked artifact"),
        ({"vcs_info": {"vcs": "git", "commit_id": "0" * 40}}, Identity.OTHER, "which is no locked artifact"),
        ({"archive_info": {"hash": f"sha256={'0' * 64}"}}, Identity.OTHER, "whose hash the lock does not name"),
        ({"archive_info": {"hashes": {"sha256": "0" * 64}}}, Identity.OTHER, "whose hash the lock does not name"),
        ({"archive_info": {"hashes": {"sha256": "LOCKED"}}}, Identity.SAME, "whose hash the lock names"),
        ({"archive_info": {}}, Identity.UNKNOWN, "its artifact is not in --wheels"),
    ],
)
def test_where_an_installer_noted_the_origin_its_word_counts(
    tmp_path: Path,
    target: Path,
    wheels: Path,
    monkeypatch: pytest.MonkeyPatch,
    origin: dict[str, object],
    identity: Identity,
    says: str,
) -> None:
    artifact = next(wheels.iterdir())
    lock = lock_of(tmp_path, lab_ops=("1.0", [artifact]))
    note = json.dumps({"url": "file:///somewhere", **origin}).replace("LOCKED", sha256(artifact))
    (target / "lab_ops-1.0.dist-info" / "direct_url.json").write_text(note)

    (pin,) = artifacts.compare(lock, installed_in(target, monkeypatch)).pins

    assert pin.identity is identity
    assert says in pin.why


def test_what_pip_itself_notes_of_a_file_is_read(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = next(wheels.iterdir())
    install(tmp_path / "target", artifact)
    other = make_wheel(tmp_path / "other", "lab_ops", "1.0", FILES)
    installed = installed_in(tmp_path / "target", monkeypatch)

    (same,) = artifacts.compare(lock_of(tmp_path, lab_ops=("1.0", [artifact])), installed).pins
    (differs,) = artifacts.compare(lock_of(tmp_path, lab_ops=("1.0", [other])), installed).pins

    assert (same.identity, differs.identity) == (Identity.SAME, Identity.OTHER)


def test_without_a_record_the_identity_is_not_known(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of(tmp_path, lab_ops=("1.0", sorted(wheels.iterdir())))
    (target / "lab_ops-1.0.dist-info" / "RECORD").unlink()

    (pin,) = artifacts.compare(lock, installed_in(target, monkeypatch), [wheels]).pins

    assert (pin.identity, pin.why) == (Identity.UNKNOWN, "it was installed without a RECORD by pip")


def test_a_folder_that_is_not_there_and_a_wheel_that_is_none_are_errors(
    tmp_path: Path, target: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(wheels)
    wheels.mkdir()
    broken = wheels / "lab_ops-1.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    (wheels / "not-a-wheel.whl").write_bytes(b"")
    (wheels / "notes.txt").write_bytes(b"")
    lock = lock_of(tmp_path, lab_ops=("1.0", [broken]))
    installed = installed_in(target, monkeypatch)

    with pytest.raises(UpkeepError, match="no RECORD can be read in it"):
        artifacts.compare(lock, installed, [wheels])
    with pytest.raises(UpkeepError, match="there is no such folder"):
        artifacts.compare(lock, installed, [tmp_path / "nowhere"])


def test_a_lock_of_another_python_is_refused_before_anything_is_compared(tmp_path: Path, wheels: Path) -> None:
    lock_of(tmp_path, lab_ops=("1.0", sorted(wheels.iterdir())))
    path = tmp_path / "lane.txt"
    path.write_text(f"# python: 3.1\n{path.read_text()}")

    with pytest.raises(LockError, match=r"it is for Python 3\.1, and this is 3"):
        artifacts.compare(locks.read(path), {})


LINES = st.lists(
    st.tuples(st.from_regex(r"[a-z]{1,3}/[a-z]{1,3}\.py", fullmatch=True), st.from_regex("[a-z]{4}", fullmatch=True)),
    unique_by=lambda line: line[0],
    max_size=6,
)


@given(LINES, LINES)
def test_two_records_differ_in_exactly_the_files_whose_lines_differ(
    ours: list[tuple[str, str]], theirs: list[tuple[str, str]]
) -> None:
    def entries(lines: list[tuple[str, str]]) -> list[Entry]:
        return [Entry(file=file, algorithm="sha256", digest=digest, size=None) for file, digest in lines]

    made = [
        Entry(file=file, algorithm="sha256", digest="made", size=1)
        for file in ("p-1.dist-info/INSTALLER", "p-1.dist-info/uv_cache.json", "../../../bin/p", "a/__pycache__/b.pyc")
    ]

    found = artifacts.first_differences([*entries(ours), *made], entries(theirs))

    assert found == sorted({file for file, _ in set(ours) ^ set(theirs)})
