"""Three states of a difference: none, one that a pack accounts for, and one that none does."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import pytest
from drift_environments import install, installed_in, make_wheel
from hypothesis import given
from hypothesis import strategies as st

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.repro import pack_file
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.upkeep.drift import accounts, drift
from megacpp_overlays.upkeep.drift.accounts import Account, DriftState
from megacpp_overlays.upkeep.drift.drift import DriftReport
from megacpp_overlays.upkeep.drift.records import Kind

HEAD = 'repository = "lab/ops"\nupstream = "new"\npriority = "crash"\nfiles = ["ops.py"]\n'
PUBLISHED = "X = 1\n"
FIXED = "X = 2\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed one distribution into."""
    folder = tmp_path_factory.mktemp("installed")
    make_wheel(folder / "wheels", "lab_ops", "1.0", {"lab_ops/__init__.py": "", "lab_ops/ops.py": PUBLISHED})
    install(folder / "target", "lab_ops", find_links=folder / "wheels")
    return folder / "target"


@pytest.fixture
def target(installed: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(installed, tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    """An inventory with a pack that has no changes, and a folder that is no pack."""
    folder = tmp_path / "packs"
    for name in ("01-other", "notes"):
        (folder / name).mkdir(parents=True)
    (folder / "01-other" / pack_file.NAME).write_text(HEAD)
    (folder / "02-without").mkdir()
    return folder


def account_for(packs: Path, text: str, *, distribution: str = "lab_ops", name: str = "07-lab-ops") -> None:
    (packs / name).mkdir()
    block = f'[[diffs]]\ndistribution = "{distribution}"\nfile = "lab_ops/ops.py"\nsha256 = "{sha256(text)}"\n'
    (packs / name / pack_file.NAME).write_text(f"{HEAD}\n{block}")


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def examine(target: Path, packs: Path, monkeypatch: pytest.MonkeyPatch, *, quick: bool = False) -> DriftReport:
    return drift.examine(["lab-ops"], installed_in(target, monkeypatch), accounts.read(packs), (), quick=quick)


def test_another_change_of_the_same_file_is_untracked_and_says_which_pack_has_another_version(
    target: Path, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account_for(packs, FIXED)
    (target / "lab_ops" / "ops.py").write_text("X = 3\n")

    report = examine(target, packs, monkeypatch)

    assert not report.clean
    assert [each.note for each in report.untracked] == ["07-lab-ops accounts for another version of this file"]


def test_of_several_entries_for_one_file_the_one_that_matches_counts(
    target: Path, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account_for(packs, "X = 4\n", name="05-older")
    account_for(packs, FIXED)
    (target / "lab_ops" / "ops.py").write_text(FIXED)

    report = examine(target, packs, monkeypatch)

    assert [each.pack for each in report.rows[0].differences] == ["07-lab-ops"]
    assert report.stale == ()


def test_a_file_that_is_gone_is_not_the_change_that_a_pack_accounts_for(
    target: Path, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account_for(packs, FIXED)
    (target / "lab_ops" / "ops.py").unlink()

    (missing,) = examine(target, packs, monkeypatch).untracked

    assert (missing.kind, missing.sha256, missing.block) == (Kind.MISSING, None, None)


def test_a_quick_look_still_reads_the_files_that_the_inventory_names(
    target: Path, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account_for(packs, FIXED)  # as long as what was published
    (target / "lab_ops" / "ops.py").write_text(FIXED)

    report = examine(target, packs, monkeypatch, quick=True)

    assert report.rows[0].state is DriftState.TRACKED
    assert report.stale == ()


def test_entries_of_what_is_not_installed_are_passed_over(
    target: Path, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account_for(packs, FIXED, distribution="never-published")

    assert examine(target, packs, monkeypatch).stale == ()


def test_what_the_inventory_names_is_looked_at_without_being_asked_for(packs: Path) -> None:
    account_for(packs, FIXED, distribution="Lab.Ops")

    assert "lab-ops" in drift.usual((), accounts.read(packs))


def test_pasting_the_printed_entry_into_a_pack_makes_the_change_tracked(
    target: Path, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target / "lab_ops" / "ops.py").write_text(FIXED)
    (target / "lab_ops" / "added.py").write_text("")
    before = examine(target, packs, monkeypatch)

    blocks = "\n\n".join(str(each.block) for each in before.untracked)
    path = packs / "01-other" / pack_file.NAME
    path.write_text(f"{path.read_text()}\n{blocks}\n")

    assert len(before.untracked) == 2
    assert examine(target, packs, monkeypatch).clean


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
@given(st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), min_size=1))
def test_an_entry_of_any_file_name_is_read_back_as_it_was(file: str) -> None:
    import tomllib

    changed = Account(
        distribution="lab-ops",
        file=file,
        kind=Kind.CHANGED,
        sha256=sha256(FIXED),
        state=DriftState.UNTRACKED,
        pack=None,
        note="",
    )

    expected = {"distribution": "lab-ops", "file": file, "sha256": sha256(FIXED)}
    assert tomllib.loads(str(changed.block)) == {"diffs": [expected]}


def test_an_inventory_that_cannot_be_read_is_an_error(packs: Path, tmp_path: Path) -> None:
    with pytest.raises(UpkeepError, match="there is no such folder"):
        accounts.read(tmp_path / "nowhere")
    (packs / "01-other" / pack_file.NAME).write_text("repository =")
    with pytest.raises(PackError, match=r"01-other/pack\.toml is no TOML"):
        accounts.read(packs)
