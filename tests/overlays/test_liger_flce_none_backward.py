"""Pack 09 on real releases: per-token gradients of the fused linear cross entropy, each release in its own process.

On the CPU the kernels run in the Triton interpreter; the tests marked `gpu` run the same cases natively.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from liger_cases import CASES
from liger_releases import Releases
from releases import daily, only

from megacpp_overlays.feature_probes import liger_flce_none_backward as feature
from megacpp_overlays.model import Observation
from megacpp_overlays.overlays.liger_flce_none_backward import OVERLAY
from megacpp_overlays.source import forms

Report = Callable[..., dict[str, Any]]
Whole = Callable[[str], dict[str, Any]]

ACTIVE = {
    "0.5.3": feature.DETACHED,
    "0.5.8": feature.DETACHED,
    "0.6.3": feature.INPUT_NEEDS_GRADIENT,
    "0.6.4": feature.BIAS_NEEDS_GRADIENT,
    "0.7.0": feature.BIAS_NEEDS_GRADIENT,
    "0.8.0": feature.DETACHED,
    "0.8.1": feature.DETACHED,
}
"""Releases that are repaired, and their shape: one of each form that is recorded."""
WITH_METRICS = [version for version in ACTIVE if CASES["token accuracy"].runs_on(version)]
ALL_CASES = ("0.6.3", "0.7.0", "0.8.1")
"""Releases that run every case on the CPU, where the interpreter is slow; the others run a few."""
FEW_CASES = ("zero first", "masked", "every option", "every option but token scaling", "frozen input", "frozen weight")
RETIRED = ("0.8.2", "0.8.5")
OLDER = "0.6.4"
"""The older release of every day: of another shape than the newest, and one that runs a few cases."""
MEASURED = "0.8.1"
"""The release whose runs count for coverage; those of the others run the same lines of the package."""
WRONG = ("0.5.3", "0.8.1")
"""Releases that are also run without the overlay."""

KEPT = {"logits": "keep"}
"""A choice of memory: logits that are kept, and not computed again, in several blocks."""

FLOAT32 = 1e-5
HALF = 3e-2
UPSTREAM_TANH = 2e-2
"""Largest relative error. In half precision the logits themselves are rounded; one scale for all is wrong by 0.5."""


@pytest.fixture(scope="module")
def releases(wheel: Callable[[str, str], Path]) -> Releases:
    pytest.importorskip("triton")
    return Releases(
        wheel,
        "liger_grid.py",
        lambda version, cases: version == MEASURED and len(cases) > len(FEW_CASES),
    )


@pytest.fixture
def report(releases: Releases, run_python: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return the report of a release: `report("0.8.1", ["plain"])`."""
    return functools.partial(releases.report, run_python)


def runs(version: str, device: str) -> list[str]:
    """Return the cases that a release is run with on a device."""
    names = CASES if version in ALL_CASES or device == "cuda" else FEW_CASES
    return [name for name in names if CASES[name].runs_on(version)]


@pytest.fixture
def whole(report: Report, grid_size: str) -> Whole:
    """Return the report of a release with its cases, of every day with a few of them: `whole("0.8.1")`."""

    def of(version: str) -> dict[str, Any]:
        names = runs(version, "cpu")
        return report(version, names if grid_size == "all" else [each for each in names if each in FEW_CASES])

    return of


def check(result: dict[str, Any], name: str, *, decision: str = "active") -> None:
    """Assert that nothing unwanted happened in a case, and that loss and gradients are right."""
    case = CASES[name]
    rounded = case.dtype != "float32" or bool(case.autocast)
    capped = "softcap" in case.options
    limit = HALF if rounded else FLOAT32
    if capped and not rounded and decision == "retired":
        limit = UPSTREAM_TANH  # the hardware's approximate one
    limits = dict.fromkeys(result["errors"], limit)
    assert result["problems"] == []
    assert {tensor: error for tensor, error in result["errors"].items() if not error < limits[tensor]} == {}


def each_case(device: str) -> Any:
    cases = [(version, name) for version in ACTIVE for name in runs(version, device)]
    return pytest.mark.parametrize(("version", "name"), only(cases, itertools.product((OLDER, MEASURED), FEW_CASES)))


each_release = pytest.mark.parametrize("version", daily(*ACTIVE, older=OLDER))


def test_one_release_of_every_recorded_form_is_run() -> None:
    """Other code of the kernel's module does not count: 0.5.5 has the kernel of 0.5.4."""
    record = forms.record("liger-flce-none-backward", feature.MODULE)
    rest = record.places.index("liger_kernel.ops.cross_entropy:")
    repaired = [each for each in record.forms if each.shape in OVERLAY.replacements]
    parts = {each.trees: (*each.digests[:rest], *each.digests[rest + 1 :]) for each in repaired}
    run = {parts[each.trees] for each in repaired if ACTIVE.keys() & {*each.trees}}

    assert run == {*parts.values()}


# The defect, without the overlay.


@pytest.mark.parametrize("version", daily(*WRONG, older=MEASURED))
@pytest.mark.parametrize("name", ["zero first", "masked", "plain"])
def test_upstream_scales_every_gradient_by_the_first_one(report: Report, version: str, name: str) -> None:
    found = report(version, ["zero first", "masked", "plain"], MEGACPP_OVERLAYS="off")

    assert found["decision"] == "disabled"
    errors = found["cases"][name]["errors"]
    assert errors["loss"] < FLOAT32
    assert min(errors["input"], errors["weight"]) > 0.5


# With it.


@each_release
def test_every_broken_release_is_repaired(whole: Whole, version: str) -> None:
    found = whole(version)

    assert (found["decision"], found["shape"]) == ("active", ACTIVE[version])


@each_case("cpu")
def test_gradients_are_right_for_every_token(whole: Whole, version: str, name: str) -> None:
    check(whole(version)["cases"][name], name)


@each_release
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_other_reductions_stay_upstream_s_to_the_last_bit(whole: Whole, version: str, reduction: str) -> None:
    assert whole(version)["same"][reduction]


@pytest.mark.parametrize("name", only(CASES, FEW_CASES))
def test_gradients_are_right_from_logits_that_were_kept(report: Report, name: str) -> None:
    names = [each for each in runs(MEASURED, "cpu") if (each in FEW_CASES) == (name in FEW_CASES)]
    check(report(MEASURED, names, memory=KEPT)["cases"][name], name)


def assert_nearer_to_the_truth(found: dict[str, Any]) -> None:
    """Assert that errors of losses and z-losses are at most 1.1 times upstream's. Upstream rounds the factor of token scaling to the dtype of the logits."""
    for dtype, result in found["losses"].items():
        assert result["same kinds"]
        for mine, upstream_s in zip(result["ours"], result["theirs"], strict=True):
            assert mine <= 1.1 * upstream_s + 1e-7, dtype
    assert max(found["losses"]["float32"]["apart"]) < FLOAT32


@each_release
def test_the_losses_are_upstream_s_but_for_rounding_and_nearer_to_the_truth(whole: Whole, version: str) -> None:
    assert_nearer_to_the_truth(whole(version))


@pytest.mark.parametrize("version", daily(*WITH_METRICS, older=MEASURED))
def test_all_outputs_are_upstream_s_to_the_last_bit_where_metrics_are_among_them(whole: Whole, version: str) -> None:
    """Losses, z-loss, token accuracy and predicted tokens, and None for those that were not asked for."""
    assert whole(version)["same with metrics"]


@each_release
def test_a_second_derivative_is_refused(whole: Whole, version: str) -> None:
    assert "once_differentiable" in whole(version)["second derivative"]


@pytest.mark.parametrize("version", daily(*RETIRED, older="0.8.5"))
def test_a_repaired_upstream_retires_the_overlay_and_is_right(report: Report, version: str) -> None:
    cases = ["zero first", "masked", "z-loss", "token scaling", "bias"]  # their class weights need a GPU

    found = report(version, cases)

    assert found["decision"] == "retired"
    for name in cases:
        check(found["cases"][name], name, decision="retired")


CALL = """
import json, sys
import megacpp_overlays
import torch
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function
x = torch.linspace(-1, 1, 6).view(3, 2).requires_grad_()
weight = torch.linspace(1, -2, 10).view(5, 2).requires_grad_()
target = torch.tensor([0, 4, -100])
def losses(x, weight, target, bias=None, ce_weight=None, scaling=False, z_loss=False, accuracy=False):
    terms = (-100, 0.0, 0.0, "none", None, z_loss, None, scaling, accuracy)
    return function.apply(x, weight, target, bias, ce_weight, *terms)[0]
"""


def test_calls_that_upstream_refuses_are_refused_in_the_same_words(
    releases: Releases, run_python: Callable[..., Any]
) -> None:
    code = f"""{CALL}
calls = {{
    "hidden states of three dimensions": (x[None], weight, target),
    "another hidden size": (x, torch.ones(5, 4), target),
    "another dtype": (x.bfloat16(), weight, target),
    "no token": (x[:0], weight, target[:0]),
    "no hidden size": (x[:, :0], weight[:, :0], target),
    "a bias of another size": (x, weight, target, torch.ones(4)),
    "class weights of another size": (x, weight, target, None, torch.ones(4)),
    "class weights that are integers": (x, weight, target, None, torch.ones(5, dtype=torch.int64)),
    "targets of two dimensions with token scaling": (x, weight, target[:, None], None, None, True),
    "a flag that is a number": (x, weight, target, None, None, False, 1),
    "a flag that is a word": (x, weight, target, None, None, False, False, "yes"),
    "hidden states that are no tensor": (None, weight, target),
    "an argument too many": (x, weight, target, None, None, False, False, False, 1),
}}
def refusals():
    found = {{}}
    for name, call in calls.items():
        try:
            losses(*call)
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
        else:
            found[name] = "accepted"
    return found
ours = refusals()
megacpp_overlays.undo("liger-flce-none-backward")
print(json.dumps([ours, refusals()]))
"""
    ours, theirs = json.loads(releases.python(run_python, "0.8.1", code, TRITON_INTERPRET="1").stdout)

    assert "accepted" not in ours.values()
    assert ours == theirs


def test_too_few_targets_are_refused_where_upstream_reads_past_their_end(
    releases: Releases, run_python: Callable[..., Any]
) -> None:
    code = f"""{CALL}
try:
    losses(x, weight, torch.tensor([0, 4, 1])[:2])
except ValueError as error:
    print(error)
"""
    done = releases.python(run_python, "0.8.1", code, TRITON_INTERPRET="1")

    assert done.stdout == "3 tokens have only 2 targets\n"


def test_unusual_arguments_that_upstream_takes_are_taken(releases: Releases, run_python: Callable[..., Any]) -> None:
    code = f"""{CALL}
def outcome(bias, target, ce_weight=None):
    bias = bias.requires_grad_()
    x.grad = weight.grad = bias.grad = None
    loss = losses(x, weight, target, bias, ce_weight)
    loss.backward(torch.tensor([0.5, 2.0, 3.0]))
    return loss.detach(), x.grad, weight.grad, bias.grad
plain = outcome(torch.full((5,), 0.25), target)
for bias in (torch.full((1, 5), 0.25), torch.full((1,), 0.25), torch.tensor(0.25)):
    for each in (target, target[:, None], target.int(), torch.cat([target, target])):
        found = outcome(bias, each)
        for seen, expected in zip(found[:3], plain):
            torch.testing.assert_close(seen, expected)
        torch.testing.assert_close(found[3], plain[3].expand(1, 5).sum_to_size(bias.shape))
weighted = outcome(torch.full((5,), 0.25), target, torch.ones(5))
for seen, expected in zip(outcome(torch.full((5,), 0.25), target.int(), torch.ones(5)), weighted):
    torch.testing.assert_close(seen, expected)
"""
    releases.python(run_python, "0.8.1", code, TRITON_INTERPRET="1")


BETWEEN = f"""{CALL}
bias, ce_weight = torch.zeros(5, requires_grad=True), torch.ones(5)
named = dict(x=x, weight=weight, target=target, bias=bias, ce_weight=ce_weight)
before = {{name: each.detach().clone() for name, each in named.items()}}
def slopes(loss):
    leaves = [each for each in (x, weight, bias) if each.requires_grad]
    return torch.autograd.grad(loss.sum(), leaves, retain_graph=True)
def same(loss):
    return all(torch.equal(*pair) for pair in zip(slopes(loss), right))
"""
"""Inputs with names, and whether gradients are still those of the values that the forward pass saw."""


def test_targets_bias_and_class_weights_may_be_written_again_before_the_backward_pass(
    releases: Releases, run_python: Callable[..., Any]
) -> None:
    """As with these releases, which compute gradients in the forward pass; a static or prefetch buffer is written so."""
    code = f"""{BETWEEN}
right = slopes(losses(x, weight, target, bias, ce_weight))
for way in (lambda each: each, lambda each: each.data):
    for name in ("target", "bias", "ce_weight"):
        loss = losses(x, weight, target, bias, ce_weight)
        with torch.no_grad():
            way(named[name]).copy_(torch.arange(len(named[name])))
        print(same(loss))
        named[name].data.copy_(before[name])
"""
    done = releases.python(run_python, "0.8.1", code)

    assert done.stdout.split() == ["True"] * 6


def test_hidden_states_or_an_output_layer_written_in_place_between_the_passes_are_refused(
    releases: Releases, run_python: Callable[..., Any]
) -> None:
    """As in 0.8.2, where upstream computes gradients per token: both are read again, and a copy would take their memory."""
    code = f"""{BETWEEN}
for name in ("x", "weight"):
    loss = losses(x, weight, target, bias, ce_weight)
    with torch.no_grad():
        named[name].add_(0)
    try:
        slopes(loss)
    except RuntimeError as error:
        print("modified by an inplace operation" in str(error))
"""
    done = releases.python(run_python, "0.8.1", code)

    assert done.stdout.split() == ["True"] * 2


@pytest.mark.parametrize("version", daily("0.6.3", "0.7.0", "0.8.1", older="0.8.1"))
def test_inference_tensors_are_constants_like_any_other(
    version: str, releases: Releases, run_python: Callable[..., Any]
) -> None:
    """One release of each broken shape, with usual arguments, and with a bias for which upstream's forward pass runs, too."""
    code = f"""{BETWEEN}
def gradients(given):
    loss = function.apply(*given.values(), -100, 0.0, 0.0, "none")[0]
    return torch.autograd.grad(loss.sum(), [each for each in given.values() if each is not None and each.requires_grad])
usual = named
unusual = dict(named, bias=torch.zeros(1, 5, requires_grad=True), ce_weight=None)
for given in (usual, unusual):
    for name, each in given.items():
        if each is not None:
            with torch.inference_mode():
                constant = each.detach().clone()
            pairs = zip(gradients(dict(given, **{{name: constant}})), gradients(dict(given, **{{name: each.detach()}})))
            print(constant.is_inference() and all(torch.equal(*pair) for pair in pairs))
"""
    done = releases.python(run_python, version, code, TRITON_INTERPRET="1")

    assert done.stdout.split() == ["True"] * 9


def test_kept_logits_save_the_first_backward_pass_a_product(releases: Releases, run_python: Callable[..., Any]) -> None:
    """Two of a backward pass's products are its gradients; the third are the logits."""
    code = f"""{CALL}
from megacpp_overlays.kernels.masked_products import products as bounded_products
done, product = [], bounded_products.product
def counted(*factors, **where):
    done.append(1)
    product(*factors, **where)
bounded_products.product = counted
loss = losses(x, weight, target)
print(len(done))
for _ in range(2):
    done.clear()
    loss.sum().backward(retain_graph=True)
    print(len(done))
"""
    done = releases.python(run_python, "0.8.1", code, MEGACPP_LINEAR_CE_LOGITS="keep")

    assert done.stdout.split() == ["1", "2", "3"]


def test_without_gradients_no_logits_wait_for_a_backward_pass(
    releases: Releases, run_python: Callable[..., Any]
) -> None:
    code = f"""{CALL}
from megacpp_overlays.kernels.linear_cross_entropy import parallel
forward_pass = parallel.forward_pass
def seen(*args, **options):
    found = forward_pass(*args, **options)
    print(found.kept is not None)
    return found
parallel.forward_pass = seen
losses(x, weight, target)
for mode in (torch.no_grad, torch.inference_mode):
    with mode():
        losses(x, weight, target)
"""
    done = releases.python(run_python, "0.8.1", code, MEGACPP_LINEAR_CE_LOGITS="keep")

    assert done.stdout.split() == ["True", "False", "False"]


def test_importing_chooses_no_memory_for_the_process(releases: Releases, run_python: Callable[..., Any]) -> None:
    """`auto` must look at the device that trains."""
    code = f"""{CALL}
from megacpp_overlays.kernels.linear_cross_entropy import memory
print(memory._chosen, memory._room_was_found)
"""
    done = releases.python(run_python, "0.8.1", code, MEGACPP_LINEAR_CE_LOGITS="auto")

    assert done.stdout == "None None\n"


# Requirements on the loaded code, on stand-ins of our own.


def stand_in(backward: Callable[..., Any], **more: object) -> ModuleType:
    """Return a module as upstream's is after installing, with this backward pass."""
    module = ModuleType(feature.MODULE)
    module.__file__ = __file__

    class Function:
        @staticmethod
        def forward(ctx: Any, _input: Any, weight: Any, target: Any, bias: Any = None, ce_weight: Any = None) -> None:
            """Take the arguments of upstream's function."""

    Function.backward = staticmethod(backward)  # type: ignore[attr-defined]
    vars(module).update({feature.FUNCTION: Function, feature.CORE_FORWARD: lambda x: x}, **more)
    return module


def ignoring(ctx: Any, grad_output: Any) -> tuple[Any, ...]:
    x, weight, bias, *_ = ctx.saved_tensors
    return torch.ones_like(x), torch.ones_like(weight), None, torch.ones_like(bias), None


def test_the_self_test_sees_gradients_that_are_not_per_token() -> None:
    seen = OVERLAY.self_test(stand_in(ignoring))

    assert seen.broken
    assert "_input, weight, bias" in seen.seen


def test_the_self_test_sees_a_wrong_number_of_gradients() -> None:
    seen = OVERLAY.self_test(stand_in(lambda ctx, grad_output: ignoring(ctx, grad_output)[:-1]))

    assert seen.broken
    assert "4 gradients for 5 arguments" in seen.seen


def witness(module: ModuleType) -> Observation:
    assert OVERLAY.witness is not None
    return OVERLAY.witness(module)


def test_the_witness_agrees_with_a_broken_release() -> None:
    assert witness(stand_in(ignoring)).broken


def test_the_witness_sees_a_core_that_takes_the_gradient_per_token() -> None:
    module = stand_in(ignoring, **{feature.CORE_FORWARD: lambda x, token_grad_output=None: x})

    assert not witness(module).broken


def test_the_witness_sees_that_another_backend_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("liger_kernel.ops")
    setattr(package, feature.FUNCTION, SimpleNamespace(__module__="liger_kernel.ops.backends._ascend.ops"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", package)

    seen = witness(stand_in(ignoring))

    assert not seen.broken
    assert "_ascend" in seen.seen


@pytest.mark.parametrize(("device", "broken"), [("npu", False), ("cuda", True)])
def test_the_witness_sees_that_the_ascend_backend_will_be_exported(tmp_path: Path, device: str, broken: bool) -> None:
    """While `liger_kernel.ops` is being imported it still exports the common function."""
    (tmp_path / "backends" / "_ascend" / "ops").mkdir(parents=True)
    (tmp_path / "backends" / "_ascend" / "ops" / "fused.py").touch()
    module = stand_in(ignoring, infer_device=lambda: device)
    module.__file__ = str(tmp_path / "fused.py")

    assert witness(module).broken is broken


# The same natively.


@pytest.mark.gpu
@each_case("cuda")
def test_gradients_are_right_for_every_token_on_a_gpu(report: Report, version: str, name: str) -> None:
    found = report(version, runs(version, "cuda"), device="cuda", scale=37)

    assert found["decision"] == "active"
    check(found["cases"][name], name)


@pytest.mark.gpu
@each_release
def test_on_a_gpu_everything_else_stays_upstream_s_to_the_last_bit(report: Report, version: str) -> None:
    found = report(version, runs(version, "cuda"), device="cuda", scale=37)

    assert found["same"] == {"mean": True, "sum": True}
    assert found["same with metrics"] or version not in WITH_METRICS
    assert_nearer_to_the_truth(found)


@pytest.mark.gpu
@pytest.mark.parametrize("version", RETIRED)
def test_a_repaired_upstream_is_right_on_a_gpu(report: Report, version: str) -> None:
    cases = ["zero first", "every option", "softcap", "autocast"]

    found = report(version, cases, device="cuda", scale=37)

    assert found["decision"] == "retired"
    for name in cases:
        check(found["cases"][name], name, decision="retired")


@pytest.mark.gpu
def test_a_step_after_the_first_neither_synchronises_nor_holds_all_logits(
    releases: Releases, run_python: Callable[..., Any]
) -> None:
    code = """
import megacpp_overlays
import torch
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function
tokens, hidden, vocabulary = 8192, 512, 32768
x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
target = torch.randint(0, vocabulary, (tokens,), device="cuda")
grad_output = torch.rand(tokens, device="cuda")
options = dict(ce_weight=torch.rand(vocabulary, device="cuda"), reduction="none", softcap=30.0, use_token_scaling=True)
import inspect
names = list(inspect.signature(function.forward).parameters.values())[4:]
for attempt in range(2):
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error" if attempt else "default")  # the first one counts tokens with a gradient
    loss = function.apply(x, weight, target, *(options.get(p.name, p.default) for p in names))[0]
    loss.backward(grad_output)
    torch.cuda.set_sync_debug_mode("default")
gradients = sum(leaf.grad.numel() * leaf.grad.element_size() for leaf in (x, weight))
print(torch.cuda.max_memory_allocated() - before - gradients)
"""
    done = releases.python(run_python, "0.8.1", code)

    cublas = 64
    assert int(done.stdout) / 2**20 < 256 + cublas  # all logits: 512 MiB


@pytest.mark.gpu
@pytest.mark.parametrize("logits", ["recompute", "keep"])
def test_a_step_replays_from_a_cuda_graph(releases: Releases, run_python: Callable[..., Any], logits: str) -> None:
    code = """
import megacpp_overlays
import torch
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function
tokens, hidden, vocabulary = 2048, 256, 50001
def draw(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(vocabulary, hidden, device="cuda", generator=generator) / hidden**0.5).bfloat16()
    target = torch.randint(-1, vocabulary, (tokens,), device="cuda", generator=generator)
    return x, weight, target, torch.rand(tokens, device="cuda", generator=generator)
static = draw(0)
leaves = [each.requires_grad_() for each in static[:2]]
def step():
    for leaf in leaves:
        leaf.grad = None
    loss = function.apply(*static[:3], None, None, -1, 1e-4, 0.1, "none", 30.0, True)[0]
    loss.backward(static[3])
    return [loss.detach(), *(leaf.grad for leaf in leaves)]
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
with torch.no_grad():
    for mine, new in zip(static, draw(1)):
        mine.copy_(new)
graph.replay()
replayed = [each.clone() for each in captured]
for seen, expected in zip(replayed, step()):
    assert torch.equal(seen, expected)
"""
    releases.python(run_python, "0.8.1", code, MEGACPP_LINEAR_CE_LOGITS=logits, MEGACPP_LINEAR_CE_MEMORY_MIB="64")


def compares_a_compiled_caller(device: str) -> str:
    return """
import megacpp_overlays
import torch
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function

def losses(x, weight, target):
    return function.apply(2 * x, weight, target, None, None, -100, 0.0, 0.0, "none")[0] * 3

def gradients(call):
    x = torch.linspace(-1, 1, 64 * 32, device=DEVICE).view(64, 32).requires_grad_()
    weight = torch.linspace(1, -2, 96 * 32, device=DEVICE).view(96, 32).requires_grad_()
    target = torch.arange(64, device=DEVICE)
    call(x, weight, target).backward(torch.linspace(0, 1, 64, device=DEVICE))
    return x.grad, weight.grad

compiled = torch.compile(losses, backend=BACKEND)
for eager, compiled in zip(gradients(losses), gradients(compiled)):
    torch.testing.assert_close(eager, compiled)
""".replace("DEVICE", repr(device)).replace("BACKEND", repr("inductor" if device == "cuda" else "aot_eager"))


def test_a_compiled_caller_gets_the_same_gradients(releases: Releases, run_python: Callable[..., Any]) -> None:
    releases.python(run_python, "0.8.1", compares_a_compiled_caller("cpu"))


@pytest.mark.gpu
def test_a_compiled_caller_gets_the_same_gradients_on_a_gpu(releases: Releases, run_python: Callable[..., Any]) -> None:
    releases.python(run_python, "0.8.1", compares_a_compiled_caller("cuda"))
