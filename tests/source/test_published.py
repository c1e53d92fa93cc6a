"""Published releases: the files of a package are those of one release or of none. A known repair counts in a release alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from releases import newest
from unpacked import unpacked

from megacpp_overlays.loader import probing, registry
from megacpp_overlays.loader.decide import decide
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Decision, Erratum, Proof, Verdict
from megacpp_overlays.source import knowledge, published
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree

OVERLAY = "quant-recipe-stale-weights"
"""Repaired in the newest release."""
CALLER = "transformer/transformer_layer.py"
"""No probe of that overlay reads it."""


@pytest.fixture(scope="module")
def wheels(wheel: Callable[[str, str], Path]) -> Path:
    return wheel("megatron-core", newest())


@pytest.fixture
def copy(wheels: Path, tmp_path: Path) -> Iterator[Path]:
    """The package of the newest release, as it is installed; a test may edit it."""
    folder = tmp_path / "megatron" / "core"
    shutil.copytree(unpacked(wheels) / "megatron" / "core", folder)
    forget = published.digest_of_folder.cache_clear
    forget()
    yield folder
    forget()


def part() -> Erratum:
    return next(each for each in registry.load() if each.id == OVERLAY)


def finding(folder: Path, tmp_path: Path) -> Any:
    settings = Settings(witnesses=str(tmp_path / "witnesses"))
    return probing.known_or_examined(part(), DirectoryTree(folder.parents[1]), settings)


def test_the_newest_release_is_known_with_any_compiled_files(copy: Path) -> None:
    (copy / "__pycache__").mkdir(exist_ok=True)
    (copy / "__pycache__" / "made.cpython-312.pyc").write_bytes(b"")
    (copy / "notes.txt").write_text("")

    for target in (
        part().target,
        part().target._replace(module="megatron.core"),
        part().target._replace(module="megatron.core.fusions"),
    ):
        assert published.release_of(target, DirectoryTree(copy.parents[1])) == newest()


@pytest.mark.parametrize("change", ["edited", "removed", "renamed", "added"])
def test_one_file_that_is_another_makes_it_no_release(change: str, copy: Path) -> None:
    file = copy / CALLER
    if change == "edited":
        file.write_bytes(file.read_bytes() + b"\n")
    elif change == "removed":
        file.unlink()
    elif change == "renamed":
        file.rename(file.with_name("layer.py"))
    else:
        (copy / "transformer" / "new.py").write_text("")

    assert published.release_of(part().target, DirectoryTree(copy.parents[1])) is None


def test_the_half_of_launchers_is_a_release_only_with_the_core_that_it_calls(wheels: Path, tmp_path: Path) -> None:
    def release() -> str | None:
        published.digest_of_folder.cache_clear()
        training = part().target._replace(module="megatron.training.checkpointing")
        return published.release_of(training, DirectoryTree(tmp_path))

    shutil.copytree(unpacked(wheels) / "megatron" / "training", tmp_path / "megatron" / "training")
    assert release() is None  # without the core there is nothing that it calls
    shutil.copytree(unpacked(wheels) / "megatron" / "core", tmp_path / "megatron" / "core")
    assert release() == newest()
    core = tmp_path / "megatron" / "core" / CALLER
    core.write_bytes(core.read_bytes() + b"\n")
    assert release() is None
    published.digest_of_folder.cache_clear()


def test_a_repair_that_was_read_is_proved_on_the_release(copy: Path, tmp_path: Path) -> None:
    found = finding(copy, tmp_path)

    assert (found.verdict, found.proof) == (Verdict.FIXED, Proof.READ)


def test_in_an_edited_tree_it_is_unproved_though_nothing_that_the_probe_reads_changed(
    copy: Path, tmp_path: Path
) -> None:
    (copy / CALLER).write_bytes((copy / CALLER).read_bytes() + b"\n")

    found = finding(copy, tmp_path)

    assert (found.verdict, found.looks_repaired, found.unpublished) == (Verdict.UNRECOGNISED, True, True)
    record = decide(part(), Settings(), found)
    assert record.decision is Decision.UNPROVED
    assert "these files are of no published release" in record.reason


def test_a_release_that_is_forgotten_is_none(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (knowledge.until, published._releases):
        each.cache_clear()
    monkeypatch.setenv(knowledge.VARIABLE, "megatron-core=0.18.2")
    try:
        assert published.release_of(part().target, DirectoryTree(copy.parents[1])) is None
    finally:
        for each in (knowledge.until, published._releases):
            each.cache_clear()


def test_a_file_that_cannot_be_read_is_said(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: Any) -> None:
        raise PermissionError(13, "Permission denied", "layer.py")

    monkeypatch.setattr(published, "digest_of_folder", read)

    found = finding(copy, tmp_path)

    assert found.unpublished
    assert "layer.py: Permission denied" in found.summary()


def test_every_release_of_the_matrix_has_a_digest_of_its_own_files(wheels: Path) -> None:
    kept = json.loads(published.FILE.read_text())

    assert set(kept) == {published.key_of(each.target) for each in registry.load() if each.installs}
    with ArchiveTree(wheels) as archive:
        for key, package in {
            "megatron-core": "megatron.core",
            "megatron-core megatron.training": "megatron.training",
        }.items():
            assert kept[key][newest()] == published.digest(archive.python_files(package))
