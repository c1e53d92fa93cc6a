"""Provenance of a verdict: a published release, a reproducer that ran on this code, or text that was read."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from made_up import BROKEN_TEXT, Upstream
from releases import newest
from unpacked import unpacked

from megacpp_overlays.loader import provenance
from megacpp_overlays.loader.overview import short
from megacpp_overlays.model import Decision, Evidence, Finding, Proof, Record, Verdict

AUDIT = (
    "import runpy, sys; sys.argv = ['', 'audit', '--json']; runpy.run_module('megacpp_overlays', run_name='__main__')"
)
BROKEN = Finding(verdict=Verdict.BROKEN, shape="adds", evidence=(Evidence("x + x"),))
WITNESSED = Finding(verdict=Verdict.BROKEN, shape="adds", evidence=BROKEN.evidence, proof=Proof.WITNESSED)
UNRECOGNISED = Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=(Evidence("x * 2"),))


@dataclass
class Tree:
    """A copy of the newest release, with the results of its audits."""

    folder: Path
    run_python: Callable[..., subprocess.CompletedProcess[str]]

    def proved_by(self) -> dict[str, set[str | None]]:
        """Return the kinds of proof behind the verdicts, for the active and for the absent overlays."""
        done = self.run_python(AUDIT, self.folder, check=False)
        decided = [each for each in json.loads(done.stdout)["decisions"] if each["distribution"] == "megatron-core"]
        return {
            kind: {each["proved_by"] for each in decided if each["decision"] == kind} for kind in ("active", "absent")
        }


@pytest.fixture
def release(
    wheel: Callable[[str, str], Path], run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> Tree:
    shutil.copytree(unpacked(wheel("megatron-core", newest())), tmp_path, dirs_exist_ok=True)
    return Tree(tmp_path, run_python)


@pytest.mark.full
def test_on_a_release_every_verdict_is_proved_by_it_and_by_reading_once_any_file_was_edited(release: Tree) -> None:
    published = release.proved_by()
    with (release.folder / "megatron/core/utils.py").open("a") as file:
        file.write("# a fork\n")
    edited = release.proved_by()

    assert published == {"active": {"release"}, "absent": {"release"}}
    assert edited["active"] == {"read"}


def record(upstream: Upstream, finding: Finding | None, version: str | None = "1.0") -> Record:
    return Record(overlay=upstream.overlay(), decision=Decision.ACTIVE, reason="", finding=finding, version=version)


@pytest.mark.parametrize(
    ("finding", "version", "known"),
    [
        (WITNESSED, "1.0", provenance.Provenance.HERE),
        (BROKEN, "1.0", provenance.Provenance.READ),
        (UNRECOGNISED, "1.0", None),
        (BROKEN, None, None),
        (None, "1.0", None),
    ],
    ids=["a reproducer ran", "a probe recognised it", "unrecognised", "not installed", "not looked at"],
)
def test_a_verdict_rests_on_the_reproducer_before_the_text(
    upstream: Upstream, finding: Finding | None, version: str | None, known: provenance.Provenance | None
) -> None:
    upstream.write(BROKEN_TEXT)

    assert provenance.provenance(record(upstream, finding, version)) is known


def test_reading_is_noted_only_for_libraries_with_recorded_releases(upstream: Upstream) -> None:
    read = record(upstream, BROKEN)

    assert provenance.provenance(read) is provenance.Provenance.READ
    assert provenance.of_note(read) is None
    assert provenance.counted([read]) == ""


def test_a_report_counts_them_and_names_those_that_no_release_proves(upstream: Upstream) -> None:
    lines = [line.text for line in short("1.0", "auto", "0" * 16, [record(upstream, WITNESSED)])]

    assert "proved by: here 1" in lines
    assert f"  double-fix (pack 99), {upstream.name} 1.0, proved by: here" in lines
