"""Pack 46 on real releases: the fused linear cross entropy of labelled tokens alone, each release in its own process.

On the CPU the kernels run in the Triton interpreter, where upstream's take neither class weights nor softcaps; the tests
marked `gpu` run the same cases natively, with the overlay and without.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from liger_cases import CASES
from liger_releases import Releases
from placed_seams import placed
from releases import daily, newest

from megacpp_overlays.feature_probes.liger_flce_labelled import EVERY_TOKEN, OLDER, TARGET
from megacpp_overlays.feature_probes.liger_flce_none_backward import CORE_FORWARD
from megacpp_overlays.kernels import measured
from megacpp_overlays.overlays import liger_flce_labelled
from megacpp_overlays.overlays.liger_flce_labelled import OVERLAY

ON = {"MEGACPP_OVERLAY_LIGER_FLCE_LABELLED": "on"}
NEWEST = newest("liger-kernel")
RELEASES = ("0.8.2", "0.8.3", NEWEST)
"""Without 0.8.4: it has the same kernel file as 0.8.3."""
ONCE = [name for name, case in CASES.items() if case.use == "once" and case.runs_on(NEWEST)]
FEW = ["plain", "masked", "all ignored", "bias", "token accuracy", "token scaling", "bfloat16", "frozen input"]
SKIP, KEEP = {"masked": "skip"}, {"masked": "skip", "logits": "keep"}
MEASURED = NEWEST
"""The release whose runs count for coverage."""
FLOAT32, HALF = 1e-5, 3e-2
NEAR = 1.5
"""Largest ratio of our error to upstream's, where both are rounding."""
DECLINED = {
    ("every option", "mean"): "class weights and a z-loss",
    ("every option but token scaling", "mean"): "class weights and a z-loss",
    ("softcap, every option", "mean"): "class weights and a z-loss",
    **{("token accuracy and predicted tokens", each): "predicted tokens" for each in ("mean", "sum", "none")},
}
"""Cases that upstream computes with the overlay, too."""


@pytest.fixture(scope="module")
def releases(wheel: Callable[[str, str], Path]) -> Releases:
    pytest.importorskip("triton")
    return Releases(
        wheel,
        "liger_labelled_grid.py",
        lambda version, cases: version == MEASURED and len(cases) > len(FEW),
    )


@pytest.fixture
def report(releases: Releases, run_python: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return the report of a release: `report("0.8.5", FEW)`."""
    return functools.partial(releases.report, run_python, memory=SKIP, **ON)


Report = Callable[..., dict[str, Any]]
CasesOf = Callable[[str], list[str]]


@pytest.fixture
def cases_of(grid_size: str) -> Callable[[str], list[str]]:
    """Return the cases of a release: all of them for the newest in the full tests."""
    return lambda version: ONCE if version == NEWEST and grid_size == "all" else FEW


def limit(name: str) -> float:
    case = CASES[name]
    return HALF if case.dtype != "float32" or case.autocast else FLOAT32


def served(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, reduction and outcome of each case that the overlay computes."""
    for name, by_reduction in found["on"].items():
        for reduction, result in by_reduction.items():
            if (name, reduction) not in DECLINED:
                yield name, reduction, result


def compared_with_upstream(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Yield name, reduction, our outcome and upstream's, where upstream runs."""
    for name, reduction, result in served(found):
        theirs = found["off"][name][reduction]
        if "raised" not in theirs:
            yield name, reduction, result, theirs


@pytest.mark.parametrize("version", daily(*RELEASES))
def test_losses_and_gradients_are_right_for_every_reduction(report: Report, cases_of: CasesOf, version: str) -> None:
    found = report(version, cases_of(version))

    assert (found["decision"], found["shape"]) == ("active", EVERY_TOKEN)
    for name, reduction, result in served(found):
        assert "raised" not in result, (name, reduction, result)
        wrong = {tensor: error for tensor, error in result["errors"].items() if not error < limit(name)}
        assert wrong == {}, (name, reduction)


@pytest.mark.parametrize("version", daily(*RELEASES))
def test_outputs_have_upstream_s_types_and_accuracies_and_z_losses_its_values(
    report: Report, cases_of: CasesOf, version: str
) -> None:
    compared = 0
    for name, reduction, ours, theirs in compared_with_upstream(report(version, cases_of(version))):
        assert ours["kinds"] == theirs["kinds"], (name, reduction)
        for mine, other in zip(ours["others"], theirs["others"], strict=True):
            assert (mine is None) == (other is None), (name, reduction)
            if other is not None:
                assert mine == pytest.approx(other, rel=limit(name), abs=limit(name)), (name, reduction)
                compared += 1
    assert compared >= 3


def test_tokens_without_a_label_are_not_multiplied(report: Report, cases_of: CasesOf) -> None:
    found = report(NEWEST, cases_of(NEWEST))

    for name, labelled in (("masked", 5), ("bias", 6), ("plain", 7), ("all ignored", 0)):
        for reduction, products in (("mean", 3), ("sum", 3), ("none", 4)):
            ours, theirs = (found[state][name][reduction]["flops"] for state in ("on", "off"))
            one = 2 * CASES[name].hidden * CASES[name].vocabulary
            assert (ours, theirs) == (labelled * products * one, CASES[name].tokens * products * one), (name, reduction)


@pytest.mark.full
def test_declined_cases_have_upstream_s_bits_or_errors(report: Report) -> None:
    found = report(NEWEST, ONCE)

    for name, reduction in DECLINED:
        assert found["on"][name][reduction] == found["off"][name][reduction]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_output_layer_over_a_frozen_input_gets_a_gradient(report: Report, cases_of: CasesOf, reduction: str) -> None:
    found = report(NEWEST, cases_of(NEWEST))

    assert found["on"]["frozen input"][reduction]["errors"]["weight"] < FLOAT32
    assert found["off"]["frozen input"][reduction]["errors"]["weight"] == 1.0  # none


def test_results_are_right_with_kept_logits(releases: Releases, run_python: Callable[..., Any]) -> None:
    found = releases.report(run_python, NEWEST, ["plain", "masked", "bias"], memory=KEEP, **ON)

    for name, reduction, result in served(found):
        assert max(result["errors"].values()) < limit(name), (name, reduction)


def test_older_releases_are_a_conflict_that_says_so(report: Report) -> None:
    found = report("0.8.1", [])

    assert (found["decision"], found["shape"]) == ("conflict", OLDER)
    assert "use liger-kernel 0.8.2 or newer" in found["reason"]


def test_mean_and_sum_save_gradients_in_the_forward_pass_and_inference_tensors_get_none(
    releases: Releases, run_python: Callable[..., Any]
) -> None:
    """A write between the passes does not change them, as with upstream's own."""
    code = """
import megacpp_overlays
import torch
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function
assert next(each for each in megacpp_overlays.audit().records if each.overlay.pack == 46).decision.value == "active"
def inputs():
    x, weight = torch.linspace(-1, 1, 6).view(3, 2), torch.linspace(1, -2, 10).view(5, 2)
    return [x.requires_grad_(), weight.requires_grad_(), torch.tensor([0, 4, -100]), torch.zeros(5).requires_grad_()]
def gradients(loss, given):
    return torch.autograd.grad(loss, [each for each in given if each.requires_grad])
def losses(given, reduction):
    return function.apply(*given, None, -100, 0.0, 0.0, reduction)[0]
for reduction in ("mean", "sum"):
    given = inputs()
    right = gradients(losses(given, reduction), given)
    for written in range(4):
        given = inputs()
        loss = losses(given, reduction)
        with torch.no_grad():
            given[written].copy_(torch.ones_like(given[written]))
        print(all(torch.equal(*pair) for pair in zip(gradients(loss, given), right, strict=True)))
    for constant in range(4):
        given = inputs()
        expected = [each for place, each in zip((0, 1, 3), right) if place != constant]
        with torch.inference_mode():
            given[constant] = given[constant].detach().clone()
        seen = gradients(losses(given, reduction), given)
        print(all(torch.equal(*pair) for pair in zip(seen, expected, strict=True)))
"""
    done = releases.python(run_python, NEWEST, code, TRITON_INTERPRET="1", **ON)

    assert done.stdout.split() == ["True"] * 16


# In this process


def asked(  # type: ignore[no-untyped-def]
    _input,
    weight,
    target,
    ce_weight=None,
    bias=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
    use_token_scaling=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    ce_impl=None,
    ce_mode=None,
    token_grad_output=None,
    compute_gradients=None,
    weight_requires_grad=None,
    chunk_mem_const=1,
):
    """Stand for the newest release's function: only its parameters matter here."""
    raise AssertionError("upstream is called")


@pytest.fixture
def module() -> ModuleType:
    """A module with the name and the names of Liger's."""
    found = ModuleType(TARGET.module)
    vars(found).update({CORE_FORWARD: asked, TARGET.symbol: type(TARGET.symbol, (), {"__module__": TARGET.module})})
    asked.__module__, asked.__qualname__ = TARGET.module, CORE_FORWARD
    return found


def test_the_self_test_sees_a_wrong_reduction(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with placed(OVERLAY, EVERY_TOKEN, module):
        assert not OVERLAY.self_test(module).broken
        monkeypatch.setattr(liger_flce_labelled, "_reduced", lambda losses, *_: losses.sum())
        seen = OVERLAY.self_test(module)
    assert (seen.broken, seen.seen) == (True, "wrong for mean")


def test_a_function_that_others_export_is_not_ours_to_replace(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = ModuleType("liger_kernel.ops")
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    assert OVERLAY.witness(module).broken
    vars(ops)[TARGET.symbol] = type("Other", (), {"__module__": "vendor"})

    seen = OVERLAY.witness(module)

    assert (seen.broken, seen.seen) == (False, "liger_kernel.ops exports the one of vendor")


def test_unmeasured_devices_keep_upstream_s_function_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measured, "_said", set())
    monkeypatch.setattr(measured, "_triton", lambda: "3.6.0")
    monkeypatch.setattr(torch.version, "hip", None)
    is_measured, device = liger_flce_labelled._is_measured, torch.device("cuda:0")
    for capability, expected in (((9, 0), True), ((10, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert is_measured(device) is expected
    assert [each.getMessage() for each in caplog.records] == [
        "liger-flce-labelled: nothing was measured on compute capability 10.0, but on 9; "
        "liger-kernel's own fused linear cross entropy serves it"
    ]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["0.8.2", NEWEST])
@pytest.mark.parametrize("memory", [SKIP, {"masked": "compute", "block_classes": 128}], ids=["skip", "compute"])
def test_on_a_gpu_errors_are_as_small_as_upstream_s(
    releases: Releases, run_python: Callable[..., Any], version: str, memory: dict[str, Any]
) -> None:
    found = releases.report(run_python, version, ONCE, device="cuda", scale=48, memory=memory, **ON)

    assert found["decision"] == "active"
    compared = list(compared_with_upstream(found))
    assert len(compared) > 60
    for name, reduction, ours, theirs in compared:
        for tensor, error in ours["errors"].items():
            if (name, tensor) != ("frozen input", "weight"):
                assert error <= max(NEAR * theirs["errors"][tensor], limit(name) / 5), (name, reduction, tensor)
