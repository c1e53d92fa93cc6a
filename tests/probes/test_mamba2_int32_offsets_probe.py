"""The probe of the width of offsets in Mamba-2's kernels: their places in a release, and edits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from edited_code import archive
from probing import Texts, ask

from megacpp_overlays.feature_probes.mamba2_int32_offsets import NARROW, NORM, SCAN, probe_norm, probe_scan
from megacpp_overlays.model import Finding, Target, Verdict
from megacpp_overlays.source.trees import SourceTree

Probe = Callable[[SourceTree], Finding]

BOTH = [(probe_scan, SCAN), (probe_norm, NORM)]


def edited(probe: Probe, module: str, change: Callable[[str], str]) -> Finding:
    tree = archive("mamba_ssm-2.3.2.post1")
    source = tree.module(module)
    assert source is not None
    text = change(source.text)
    assert text != source.text
    return ask(probe, Texts({module: text}, tree))


@pytest.mark.parametrize("version", ["2.0.1", "2.3.2.post1"])
@pytest.mark.parametrize(("probe", "target"), BOTH)
def test_releases_of_mamba_2_are_broken(version: str, probe: Probe, target: Target) -> None:
    finding = probe(archive(f"mamba_ssm-{version}.tar"))

    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, NARROW)
    assert finding.evidence[0].line is not None
    assert target.module.rpartition(".")[2] in str(finding.evidence[0].file)


def test_a_release_that_imports_what_is_not_there_is_not_recognised() -> None:
    assert ask(probe_scan, archive("mamba_ssm-2.0.0.tar")).verdict is Verdict.UNRECOGNISED


def test_comments_do_not_count() -> None:
    for probe, target in BOTH:
        assert edited(probe, target.module, lambda text: f"{text}\n# the end\n").verdict is Verdict.BROKEN


@pytest.mark.parametrize("module", [SCAN.module, *(f"{SCAN.module[:-8]}{name}" for name in ("bmm", "state_passing"))])
def test_any_statement_of_any_module_that_differs_is_not_recognised(module: str) -> None:
    finding = edited(probe_scan, module, lambda text: f"{text}\nfaster = True\n")

    assert finding.verdict is Verdict.UNRECOGNISED
    assert module in finding.summary()


def test_so_is_one_that_is_missing_or_hands_the_pass_on() -> None:
    tree = archive("mamba_ssm-2.3.2.post1")
    missing = ask(probe_scan, Texts({f"{SCAN.module[:-8]}bmm": None}, tree))
    elsewhere = edited(probe_norm, NORM.module, lambda text: text.replace(f"def {NORM.symbol}(", "def other("))

    assert missing.verdict is Verdict.UNRECOGNISED
    assert elsewhere.verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(("probe", "target"), BOTH)
def test_what_is_not_there_is_absent(probe: Probe, target: Target) -> None:
    assert ask(probe, Texts({target.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({target.module: "class Other: pass"})).verdict is Verdict.ABSENT


def test_one_kernel_that_widens_its_products_is_not_recognised() -> None:
    step = f"{SCAN.module[:-8]}chunk_state"

    finding = edited(
        probe_scan, step, lambda text: text.replace("tl.program_id(axis=1)", "tl.program_id(axis=1).to(tl.int64)")
    )

    assert finding.verdict is Verdict.UNRECOGNISED
