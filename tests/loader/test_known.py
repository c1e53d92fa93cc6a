"""Known findings: equal to the probe's for the same texts, and used for no others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import FINDINGS, HANG_S, ROOT

from megacpp_overlays.errors import SourceError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import known, ownership, probing, registry
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.loader.witnesses import RecordingTree
from megacpp_overlays.model import Evidence, Finding, Overlay, Verdict
from megacpp_overlays.source.trees import CachedTree, InstalledTree, ModuleSource

OVERLAYS = [each for each in registry.load() if isinstance(each, Overlay)]
INSTALLED = CachedTree(InstalledTree())
HERE = [each for each in OVERLAYS if known.finding(each, INSTALLED) is not None]
"""Parts with a known finding for the releases that are installed here."""

pytestmark = pytest.mark.upstream


def name(overlay: Overlay) -> str:
    return known.name_of(overlay)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    known._kept.cache_clear()
    yield
    known._kept.cache_clear()


class AlteredPackages:
    """The installed packages with text added to one module, or with that module unreadable."""

    def __init__(self, module: str, text: str | None) -> None:
        self._module = module
        self._text = text

    def module(self, name: str) -> ModuleSource | None:
        found = INSTALLED.module(name)
        if name != self._module or found is None:
            return found
        if self._text is None:
            raise SourceError(f"{found.path} cannot be read")
        return ModuleSource(name, found.path, found.text + self._text)


def modules_read_by(overlay: Overlay) -> list[str]:
    """Return the modules that the probe of a part reads."""
    tree = RecordingTree(INSTALLED)
    overlay.probe(tree)
    return [*tree.sources]


def test_most_parts_have_a_known_finding_here() -> None:
    assert len(HERE) > len(OVERLAYS) * 3 // 4


@pytest.mark.parametrize("overlay", HERE, ids=name)
def test_a_known_finding_equals_that_of_the_probe_with_its_places(overlay: Overlay) -> None:
    assert known.finding(overlay, INSTALLED) == probing.examine(overlay, INSTALLED)


@pytest.mark.parametrize("overlay", HERE, ids=name)
def test_a_known_finding_is_not_used_when_any_module_that_the_probe_reads_has_changed(overlay: Overlay) -> None:
    installed = [each for each in modules_read_by(overlay) if INSTALLED.module(each) is not None]

    for module in installed:
        assert known.finding(overlay, AlteredPackages(module, "#")) is None
        assert known.finding(overlay, AlteredPackages(module, None)) is None


@pytest.mark.parametrize("overlay", HERE, ids=name)
def test_known_places_of_functions_are_right(overlay: Overlay) -> None:
    source = INSTALLED.module(overlay.target.module)
    places = known.places(overlay, INSTALLED)
    found = known.finding(overlay, INSTALLED)
    assert found is not None

    assert all(source and place == ownership.place_of(source, symbol) for symbol, place in places.items())
    if found.verdict is Verdict.BROKEN and overlay.answers(found.shape):
        assert places.keys() == {each.symbol for each in overlay.replacements[found.shape or ""]}


def test_the_loader_uses_a_known_finding_and_runs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = next(each for each in HERE if each.id == "float16-fp32-exemption")
    expected = probing.examine(overlay, INSTALLED)
    module = ModuleType(overlay.target.module)  # an import of the real one would arm this process

    def refuse(*_: Any, **__: Any) -> Finding:
        raise AssertionError("a probe ran")

    monkeypatch.setattr(probing, "examine", refuse)

    assert probing.assess_overlay(overlay, module, Settings(), INSTALLED).finding == expected


# --- known findings that are not used ---


def kept() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(known.FILE.read_text())
    return data


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**kept(), "probes": "0" * 64}),
        json.dumps({**kept(), "pythons": ["2.7"]}),
        json.dumps({**kept(), "more": 1}),
        json.dumps([]),
        "{",
        None,
    ],
    ids=["of other probes", "of another Python", "of another form", "a list", "half of it", "not there"],
)
def test_a_file_of_other_code_or_another_form_is_not_used(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "FILE", tmp_path / "known.json")
    if text is not None:
        (tmp_path / "known.json").write_text(text)

    assert [each.id for each in HERE if known.finding(each, INSTALLED)] == []
    assert known.places(HERE[0], INSTALLED) == {}


def test_a_package_without_source_text_uses_no_known_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_PACKAGE", tmp_path)

    assert known.finding(HERE[0], INSTALLED) is None


def test_an_overlay_of_the_same_name_with_another_probe_uses_no_known_findings() -> None:
    theirs = replace(HERE[0], probe=lambda _: Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence("none"),)))

    assert known.finding(theirs, INSTALLED) is None


def test_a_finding_that_is_unrecognised_or_names_another_file_is_not_kept() -> None:
    doubt = Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=(Evidence("odd"),))
    with_a_path = Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence("nothing in /some/a.py"),))
    elsewhere = Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence("none", "/other/b.py", 3),))
    source = ModuleSource("a", "/some/a.py", "")

    assert [known.as_data(HERE[0], each, [source]) for each in (doubt, with_a_path, elsewhere)] == [None, None, None]
    assert {each["verdict"] for each in kept()["findings"]} == {"BROKEN", "FIXED", "ABSENT"}


def test_a_package_and_a_module_of_the_same_text_have_different_digests() -> None:
    texts = [ModuleSource("a", path, "from .b import c") for path in ("/x/a.py", "/x/a/__init__.py")]

    assert len({known.digest(["a"], [each]) for each in (*texts, None)}) == 3


# --- known.json is up to date ---


OTHER_PYTHONS = ("loader-3.10", "loader-3.11", "loader-3.13")


def known_findings(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-W", "ignore", "scripts/known_findings.py", *words],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_kept_findings_of_the_newest_releases_equal_those_of_the_probes() -> None:
    """Every probe runs once; `make test-all` checks all releases."""
    done = known_findings(Path(sys.executable), "--newest")

    assert (done.returncode, done.stdout) == (0, "as the probes find it\n"), done.stderr


@pytest.mark.full
@pytest.mark.parametrize("environment", [*OTHER_PYTHONS, None])
def test_kept_findings_equal_those_of_the_probes_on(environment: str | None) -> None:
    python = ROOT / ".envs" / environment / "bin" / "python" if environment else Path(sys.executable)
    if not python.exists():
        pytest.skip(f"there is no environment {environment}: `make setup` makes it where the machine has that Python")

    done = known_findings(python, "--check", "--findings", FINDINGS)

    assert (done.returncode, done.stdout) == (0, "as the probes find it\n"), done.stderr
