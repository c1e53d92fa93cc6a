"""Findings on disk: kept by the code of a probe and the texts that it asked for, and derived anew when either changes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from places import ROOT
from probing import Texts

from megacpp_overlays.errors import SourceError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import registry
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Evidence, Finding, Verdict
from megacpp_overlays.source.file_trees import ArchiveTree
from megacpp_overlays.source.trees import CachedTree, ModuleSource, SourceTree
from megacpp_overlays.upkeep import finding_cache
from megacpp_overlays.upkeep.finding_cache import FindingCache

PART = next(each for each in registry.load() if each.id == "mtp-z-loss")
MODULE = PART.target.module


@pytest.fixture(scope="module")
def release(wheel: Callable[[str, str], Path]) -> SourceTree:
    return CachedTree(ArchiveTree(wheel("megatron-core", "0.19.2")))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the parts whose probes ran, in order."""
    ran: list[str] = []
    monkeypatch.setattr(
        finding_cache, "examine", lambda part, *given, **named: (ran.append(part.id), examine(part, *given, **named))[1]
    )
    return ran


def edited(tree: SourceTree, name: str) -> Texts:
    source = tree.module(name)
    assert source is not None
    return Texts({name: source.text + "\n# edited\n"}, tree)


def test_the_kept_finding_is_the_probe_s(release: SourceTree, runs: list[str], tmp_path: Path) -> None:
    cache = FindingCache(tmp_path)
    first = cache.derive(PART, release)
    cache.save()

    again = FindingCache(tmp_path).derive(PART, release)

    assert runs == [PART.id]
    assert again == first
    assert again.finding == examine(PART, release)
    assert again.finding.verdict is Verdict.BROKEN
    assert again.finding.read


def test_a_text_that_the_probe_asked_for_derives_anew_and_no_other_does(release: SourceTree, runs: list[str]) -> None:
    cache = FindingCache()
    asked = cache.derive(PART, release).asked
    assert asked is not None
    assert MODULE in asked
    other = "megatron.core.optimizer.clip_grads"
    assert other not in asked

    cache.derive(PART, edited(release, other))
    assert runs == [PART.id]
    cache.derive(PART, edited(release, MODULE))
    cache.derive(PART, Texts({MODULE: None}, release))
    assert runs == [PART.id] * 3
    cache.derive(PART, edited(release, MODULE))  # kept by now
    assert runs == [PART.id] * 3


def test_a_finding_is_about_the_files_of_the_tree_that_was_asked(release: SourceTree, tmp_path: Path) -> None:
    cache = FindingCache()
    cache.derive(PART, release)
    source = release.module(MODULE)
    assert source is not None
    elsewhere = Texts({MODULE: source.text}, release)

    files = {each.file for each in cache.derive(PART, elsewhere).finding.evidence if each.file is not None}

    assert files == {each.file for each in examine(PART, elsewhere).evidence if each.file is not None}


class Unreadable(Texts):
    """A tree in which a module cannot be read."""

    def module(self, name: str) -> ModuleSource | None:
        if name == MODULE:
            raise SourceError(f"{name} is no text", file=None)
        return super().module(name)


def test_a_module_that_cannot_be_read_is_reported_by_the_probe(release: SourceTree) -> None:
    cache = FindingCache()
    cache.derive(PART, release)
    unreadable = Unreadable({}, release)

    found = cache.derive(PART, unreadable)

    assert found.asked is None
    assert found.finding == examine(PART, unreadable)
    assert found.finding.verdict is Verdict.UNRECOGNISED


def test_a_file_that_was_cut_off_is_derived_anew(release: SourceTree, runs: list[str], tmp_path: Path) -> None:
    cache = FindingCache(tmp_path)
    cache.derive(PART, release)
    cache.save()
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-20])

    assert FindingCache(tmp_path).derive(PART, release).finding == examine(PART, release)
    assert runs == [PART.id] * 2


def test_a_probe_of_a_plugin_is_asked_each_time(release: SourceTree, runs: list[str], tmp_path: Path) -> None:
    """The files of a plugin's probe may be anywhere, so no key can cover them."""
    part = replace(PART, probe=lambda _: Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence("nothing"),)))
    cache = FindingCache(tmp_path)

    for _ in range(2):
        assert cache.derive(part, release).asked is None
    cache.save()

    assert list(tmp_path.iterdir()) == []


# The code of a probe

KEYS = """
import json, sys
from pathlib import Path
from megacpp_overlays.loader import registry
from megacpp_overlays.upkeep import finding_cache
folder = sys.argv[1]
assert sys.modules["megacpp_overlays"].__file__.startswith(folder)

def keys(edited):
    texts = {path: path.read_text() for path in (Path(folder, "megacpp_overlays", file) for file in edited)}
    for path, text in texts.items():
        path.write_text(text + "# edited")
    finding_cache._code.cache_clear()
    found = {f"{each.id}:{each.target.module}": finding_cache.key_of(each) for each in registry.load()}
    for path, text in texts.items():
        path.write_text(text)
    return found

print(json.dumps([keys(edited) for edited in json.loads(sys.argv[2])]))
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package whose files may be edited."""
    folder = tmp_path_factory.mktemp("copy")
    left_out = shutil.ignore_patterns("__pycache__", "packs")
    shutil.copytree(ROOT / "megacpp_overlays", folder / "megacpp_overlays", ignore=left_out)
    return folder


def changed_by(folder: Path, *edits: Sequence[str]) -> Iterator[set[str]]:
    """Yield the ids of the parts whose keys change with a comment in each of some files, for each of some edits."""
    words = [sys.executable, "-c", KEYS, str(folder), json.dumps([[], *edits])]
    done = subprocess.run(words, cwd=folder, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, *edited = json.loads(done.stdout)
    for after in edited:
        assert before.keys() == after.keys()
        yield {part.partition(":")[0] for part, key in after.items() if key != before[part]}


def test_code_that_a_probe_is_made_of_derives_anew_and_no_other_does(copied: Path) -> None:
    everything = {each.id for each in registry.load()}
    others = ("overlays/mtp_z_loss.py", "loader/session.py", "cli/__init__.py", "kernels/measured.py")
    of_all = ("source/bindings.py", "model.py", "loader/probing.py")
    record = ["source/recorded/mtp-z-loss.json"]
    edits = [
        ["feature_probes/mtp_z_loss.py"],
        ["source/forms.py"],
        record,
        others,
        *([file] for file in of_all),
    ]

    own, shared, recorded, none, *whole = changed_by(copied, *edits)

    assert own == {"mtp-z-loss"}
    assert "mtp-z-loss" in shared
    assert recorded == {"mtp-z-loss"}
    assert shared < everything
    assert none == set()
    assert whole == [everything] * len(of_all)
