"""The gate of pack 08 finds TMA lowering switched on where TileLang cannot do it."""

from __future__ import annotations

import pytest
from installed import Edited, tree_of
from probing import ask

from megacpp_overlays.feature_probes.tilelang_bulk_copy_rank import TWO_AXES_ONLY, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.tilelang_bulk_copy_rank import OVERLAY

pytestmark = pytest.mark.upstream

KERNELS = "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd.py"
VARLEN = "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd_varlen.py"
OFF = "tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True"


@pytest.mark.parametrize(
    ("lane", "verdict"),
    [
        ("mamba3-pinned", Verdict.ABSENT),
        ("edge", Verdict.FIXED),
        ("spring-2026", Verdict.ABSENT),
        ("newest", Verdict.ABSENT),
    ],
)
def test_no_release_turns_the_lowering_on(lane: str, verdict: Verdict) -> None:
    assert ask(probe, tree_of(lane)).verdict is verdict


@pytest.mark.parametrize("path", [KERNELS, VARLEN])
@pytest.mark.parametrize("edit", [{OFF: OFF.replace("True", "False")}, {f"{OFF},": ""}, {"pass_configs=": "others="}])
def test_a_kernel_with_the_switch_turned_is_found(path: str, edit: dict[str, str]) -> None:
    found = ask(probe, Edited(tree_of("mamba3-pinned"), path, edit))

    assert (found.verdict, found.shape) == (Verdict.BROKEN, TWO_AXES_ONLY)
    assert "mamba_mimo_bwd_bwd has TMA lowering on" in found.summary()
    assert set(OVERLAY.unsupported) == {TWO_AXES_ONLY}


@pytest.mark.parametrize("edit", [{OFF: OFF.replace("True", "FLAG")}, {"pass_configs={": "pass_configs=CONFIGS or {"}])
def test_options_that_cannot_be_read_are_not_recognised(edit: dict[str, str]) -> None:
    assert ask(probe, Edited(tree_of("mamba3-pinned"), KERNELS, edit)).verdict is Verdict.UNRECOGNISED


def test_kernels_of_another_kind_are_not_recognised() -> None:
    edit = {"@tilelang.jit(": "@compile_with("}

    assert ask(probe, Edited(tree_of("mamba3-pinned"), KERNELS, edit)).verdict is Verdict.UNRECOGNISED


def test_with_a_newer_tilelang_the_switch_does_no_harm() -> None:
    edit = {OFF: OFF.replace("True", "False")}

    assert ask(probe, Edited(tree_of("edge"), KERNELS, edit)).verdict is Verdict.FIXED


@pytest.mark.parametrize("edit", [None, {"InputDim() == 2": "InputDim() == kAxes"}])
def test_an_unknown_tilelang_is_not_recognised_where_it_matters(edit: dict[str, str] | None) -> None:
    kernels = Edited(tree_of("mamba3-pinned"), KERNELS, {OFF: OFF.replace("True", "False")})
    other = Edited(tree_of("mamba3-pinned"), "tilelang/src/op/copy.cc", edit)

    class Both:
        module = kernels.module
        shipped = other.shipped

    assert ask(probe, Both()).verdict is Verdict.UNRECOGNISED
    assert ask(probe, other).verdict is Verdict.ABSENT


def test_a_line_break_in_the_check_means_nothing() -> None:
    kernels = Edited(tree_of("mamba3-pinned"), KERNELS, {OFF: OFF.replace("True", "False")})
    broken_line = {'InputDim() == 2) << "Cannot': 'InputDim() == 2)\n        << "Cannot'}
    other = Edited(tree_of("mamba3-pinned"), "tilelang/src/op/copy.cc", broken_line)

    class Both:
        module = kernels.module
        shipped = other.shipped

    assert ask(probe, Both()).shape == TWO_AXES_ONLY


def test_it_is_due_for_deletion_with_a_newer_tilelang() -> None:
    assert ask(OVERLAY.probe, tree_of("edge")).verdict is Verdict.FIXED
    assert ask(OVERLAY.probe, tree_of("mamba3-pinned")).verdict is not Verdict.FIXED
