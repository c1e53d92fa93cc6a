"""The index scores of pack 12 and their gradients: blocks in PyTorch, tensor cores in Triton's interpreter, operators.

Two kinds of inputs. Small whole numbers, for which float32 arithmetic is exact in any order, so that results are held
to float64 bit for bit. And random numbers, held to the bound that rounding sets for sums of that many terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import compiled_programs
import kept_answers
import pytest
import torch
import warm_python
from hypothesis import given, settings
from hypothesis import strategies as st
from index_scores_cases import (
    DEVICES,
    LAYOUTS,
    LAYOUTS_OF_GRADIENT,
    SPOILS,
    lay_out,
    lay_out_gradient,
    misplaced,
    random,
    roundings,
    spoil,
    whole,
)
from places import ROOT
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.index_scores import reference, streaming
from megacpp_overlays.kernels.index_scores import streaming as index_scores_streaming

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def double(*tensors: torch.Tensor) -> Any:
    return [tensor.double() for tensor in tensors]


def blocks_of(elements: int) -> Any:
    return mock.patch.object(streaming, "_BLOCK_ELEMENTS", elements)


SIZES = {"queries": (0, 12), "keys": (0, 12), "batch": (0, 3), "heads": (0, 4), "dim": (0, 9)}
DRAWN = {
    "seed": st.integers(0, 2**31),
    "sizes": st.fixed_dictionaries({name: st.integers(*ends) for name, ends in SIZES.items()}),
    "dtype": st.sampled_from(DTYPES),
    "of_weights": st.sampled_from([torch.float32, None]),
    "layout": st.sampled_from(LAYOUTS),
    "above": st.sampled_from(LAYOUTS_OF_GRADIENT),
    "use_relu": st.booleans(),
    "block": st.sampled_from([1, 7, 40, 100, 1 << 24]),
}


# The truth.


@pytest.mark.parametrize("use_relu", [True, False])
def test_the_reference_is_the_formula(use_relu: bool) -> None:
    q, weights, k, _ = random(0, 3, 4, 2, 3, 5, dtype=torch.float64)

    found = reference.scores(q, weights, k, use_relu)

    for batch, query, key in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        products = [float(q[query, batch, head] @ k[key, batch]) for head in range(3)]
        kept = [max(product, 0.0) if use_relu else product for product in products]
        true = sum(float(weights[query, batch, head]) * kept[head] for head in range(3))
        assert float(found[batch, query, key]) == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("use_relu", [True, False])
def test_the_gradients_of_the_reference_are_its_slopes(use_relu: bool) -> None:
    q, weights, k, above = random(1, 3, 4, 2, 3, 5, dtype=torch.float64)
    inputs = (q, weights, k)
    found = reference.gradients(above.double(), *inputs, use_relu)

    for place, gradient in enumerate(found):
        step = 1e-6 * torch.randn(gradient.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(place))
        ahead, behind = (
            reference.scores(*[each + sign * step if each is inputs[place] else each for each in inputs], use_relu)
            for sign in (1, -1)
        )
        assert float((gradient * step).sum()) == pytest.approx(float((above * (ahead - behind)).sum() / 2), rel=1e-6)


# Blocks in PyTorch.


@settings(deadline=None, max_examples=200)
@given(**DRAWN)
def test_whole_numbers_come_out_exactly(
    seed: int,
    sizes: dict[str, int],
    dtype: torch.dtype,
    of_weights: torch.dtype | None,
    layout: str,
    above: str,
    use_relu: bool,
    block: int,
) -> None:
    q, weights, k, grad = whole(seed, **sizes, dtype=dtype)
    q, weights, k = lay_out(layout, q, weights.to(of_weights or dtype), k)
    grad = lay_out_gradient(above, grad)

    with blocks_of(block):
        found = index_scores.scores(q, weights, k, use_relu)
        gradients = index_scores.gradients(grad, q, weights, k, use_relu)

    assert torch.equal(found.double(), reference.scores(*double(q, weights, k), use_relu))
    assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
    truths = reference.gradients(*double(grad, q, weights, k), use_relu)
    for gradient, true, like in zip(gradients, truths, (q, weights, k), strict=True):
        assert (gradient.dtype, gradient.shape) == (like.dtype, like.shape)
        assert torch.equal(gradient, true.to(like.dtype))


@settings(deadline=None, max_examples=100)
@given(**DRAWN)
def test_random_numbers_are_as_close_as_float32_sums_are(
    seed: int,
    sizes: dict[str, int],
    dtype: torch.dtype,
    of_weights: torch.dtype | None,
    layout: str,
    above: str,
    use_relu: bool,
    block: int,
) -> None:
    q, weights, k, grad = random(seed, **sizes, dtype=dtype)
    q, weights, k = lay_out(layout, q, weights.to(of_weights or dtype), k)
    grad = lay_out_gradient(above, grad)

    with blocks_of(block):
        found = (
            index_scores.scores(q, weights, k, use_relu),
            *index_scores.gradients(grad, q, weights, k, use_relu),
        )

    for tensor, (share, _) in roundings(found, grad, q, weights, k, use_relu).items():
        assert share <= 1, tensor


def test_float64_inputs_are_computed_in_float32_as_upstream_does() -> None:
    q, weights, k, grad = random(2, 6, 7, 2, 3, 64, dtype=torch.float64)

    found = index_scores.scores(q, weights, k)
    gradients = index_scores.gradients(grad, q, weights, k)

    assert found.dtype == torch.float32
    assert torch.equal(found, index_scores.scores(q.float(), weights.float(), k.float()))
    for gradient, single in zip(
        gradients, index_scores.gradients(grad, q.float(), weights.float(), k.float()), strict=True
    ):
        assert gradient.dtype == torch.float64
        assert torch.equal(gradient, single.double())


def plain(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool) -> torch.Tensor:
    """Return the scores with the four-axis tensor, in the arithmetic of the inputs."""
    products = torch.einsum("sbhd,tbd->sbht", q, k)
    return ((products.relu() if use_relu else products) * weights[..., None]).sum(dim=2).transpose(0, 1)


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("sizes", [(96, 160, 2, 16, 128), (130, 70, 1, 64, 64), (33, 257, 3, 5, 192)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_are_at_most_twice_those_of_a_float32_einsum(
    sizes: tuple[int, ...], dtype: torch.dtype, use_relu: bool
) -> None:
    q, weights, k, grad = random(3, *sizes, dtype=dtype)
    single, exact = [each.float() for each in (q, weights, k)], double(q, weights, k)

    def error(found: torch.Tensor, true: torch.Tensor) -> float:
        return float((found.double() - true).norm() / true.norm())

    true = reference.scores(*exact, use_relu)
    ours = error(index_scores.scores(q, weights, k, use_relu), true)
    assert ours <= 2 * error(plain(single[0], single[1], single[2], use_relu), true)
    truths = reference.gradients(grad.double(), *exact, use_relu)
    theirs = reference.gradients(grad, single[0], single[1], single[2], use_relu)
    for mine, other, truth in zip(index_scores.gradients(grad, q, weights, k, use_relu), theirs, truths, strict=True):
        assert error(mine, truth) <= 2 * error(other.to(dtype), truth)


def test_a_rerun_gives_the_same_bits() -> None:
    q, weights, k, grad = random(4, 50, 60, 2, 5, 24, dtype=torch.float32)

    with blocks_of(7 * 2 * 60):
        first, second = (
            (index_scores.scores(q, weights, k), *index_scores.gradients(grad, q, weights, k)) for _ in range(2)
        )

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class Memory(TorchDispatchMode):
    """Record of the results of operators: the largest tensor, and the most bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        passed = {StorageWeakRef(each.untyped_storage()) for each in tree_leaves(args) if torch.is_tensor(each)}
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            self.largest = max(self.largest, tensor.numel())
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference not in passed:
                self._storages[reference] = tensor.untyped_storage().nbytes()
        self._storages = {each: size for each, size in self._storages.items() if not each.expired()}
        self.peak = max(self.peak, sum(self._storages.values()))
        return result


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_that_of_results_keys_and_a_few_blocks(dtype: torch.dtype, rows: int, use_relu: bool) -> None:
    queries, keys, batch, heads, dim = 40, 64, 2, 8, 4
    q, weights, k, grad = random(5, queries, keys, batch, heads, dim, dtype=dtype)
    block = batch * rows * keys
    few = 3 * batch * rows * dim  # queries, weights and a gradient of one head

    with blocks_of(block):
        with Memory() as forward:
            streaming.scores(q, weights, k, use_relu)
        with Memory() as backward:
            streaming.gradients(grad, q, weights, k, use_relu)

    result, of_keys = batch * queries * keys, batch * keys * dim
    assert forward.largest == result >= backward.largest
    assert forward.peak <= 4 * (result + of_keys + block + few)
    assert backward.peak <= 4 * (q.numel() + weights.numel() + 3 * of_keys + 3 * block + few)


def test_blocks_are_small_compared_with_a_streamed_score_matrix() -> None:
    assert 4 * streaming._BLOCK_ELEMENTS <= 16 * 2**20


@pytest.mark.parametrize("use_relu", [True, False])
def test_a_nan_reaches_the_same_results_as_upstream(use_relu: bool) -> None:
    q, k = torch.ones(3, 1, 2, 4), -torch.ones(5, 1, 4)  # every product is negative, every gate closed
    weights, grad = torch.ones(3, 1, 2), torch.zeros(1, 3, 5)
    spoilt_q, spoilt_grad = q.clone(), grad.clone()
    spoilt_q[1, 0, 0, 2] = spoilt_grad[0, 1, 3] = float("nan")

    found = index_scores.scores(spoilt_q, weights, k, use_relu).isnan()
    of_q, of_weights, of_k = (each.isnan() for each in index_scores.gradients(spoilt_grad, q, weights, k, use_relu))
    of_spoilt = index_scores.gradients(grad, spoilt_q, weights, k, use_relu)[1].isnan()

    assert found.nonzero().tolist() == [[0, 1, key] for key in range(5)]
    assert of_q.all(dim=-1).nonzero().tolist() == of_weights.nonzero().tolist() == [[1, 0, 0], [1, 0, 1]]
    assert of_k.all(dim=-1).nonzero().tolist() == [[3, 0]]
    assert of_spoilt.nonzero().tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("spoilt", SPOILS)
def test_a_gradient_that_is_not_finite_reaches_its_query_and_its_key_and_nothing_else(spoilt: str) -> None:
    """Upstream multiplies with its gates, and 0 times NaN is NaN."""
    *how, use_relu = SPOILS[spoilt]
    q, weights, k, grad = spoil(*how)[0]

    found = index_scores.gradients(grad, q, weights, k, use_relu)

    assert misplaced(found, *SPOILS[spoilt]) == {}


# The operators.


def leaves(seed: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    q, weights, k, grad = random(seed, 6, 7, 2, 3, 8, dtype=dtype)
    return [each.requires_grad_() for each in (q, weights, k)], grad


@pytest.mark.parametrize("use_relu", [True, False])
def test_autograd_gives_the_gradients(use_relu: bool) -> None:
    inputs, grad = leaves()

    found = torch.autograd.grad(index_scores.scores(*inputs, use_relu=use_relu), inputs, grad)

    detached = [each.detach() for each in inputs]
    expected = index_scores.gradients(grad, *detached, use_relu=use_relu)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_gradient_of_one_number_may_arrive() -> None:
    inputs, _ = leaves()

    index_scores.scores(*inputs).sum().backward()  # arrives expanded, with strides of zero

    true = reference.gradients(torch.ones(2, 6, 7).double(), *double(*[each.detach() for each in inputs]))
    for each, gradient in zip(inputs, true, strict=True):
        torch.testing.assert_close(each.grad.double(), gradient, rtol=1e-5, atol=1e-5)


def test_callers_may_write_into_the_result() -> None:
    inputs, grad = leaves()
    mask = torch.zeros(6, 7).masked_fill_(torch.ones(6, 7).triu(1).bool(), float("-inf"))

    masked = index_scores.scores(*inputs)
    masked += mask
    found = torch.autograd.grad(masked, inputs, grad)

    expected = torch.autograd.grad(index_scores.scores(*inputs), inputs, grad)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert masked.isinf().equal(mask.isinf().expand(2, -1, -1))


def test_the_result_is_no_view_and_shares_no_memory() -> None:
    inputs, _ = leaves()
    found = index_scores.scores(*inputs)

    assert not found._is_view()
    assert found.untyped_storage().data_ptr() not in {each.untyped_storage().data_ptr() for each in inputs}
    assert found.untyped_storage().nbytes() == 4 * found.numel()


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_one_input_may_be_the_only_one_with_a_gradient(wanted: int) -> None:
    """All three are worked out anyhow: they share their products."""
    inputs, grad = leaves()
    expected = torch.autograd.grad(index_scores.scores(*inputs), inputs, grad)
    mixed = [each if place == wanted else each.detach() for place, each in enumerate(inputs)]

    index_scores.scores(*mixed).backward(grad)

    assert torch.equal(mixed[wanted].grad, expected[wanted])
    assert all(each.grad is None for place, each in enumerate(mixed) if place != wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(mode: Callable[[], Any]) -> None:
    inputs, _ = leaves()
    with mode():
        found = index_scores.scores(*inputs)

    assert found.grad_fn is None
    assert torch.equal(found, index_scores.scores(*inputs))


def test_a_second_derivative_is_refused() -> None:
    inputs, grad = leaves()
    first = torch.autograd.grad(index_scores.scores(*inputs), inputs, grad, create_graph=True)

    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first[0].sum().backward()


def test_an_input_that_was_changed_before_the_backward_is_refused() -> None:
    inputs, _ = leaves()
    found = index_scores.scores(*inputs)
    with torch.no_grad():
        inputs[0].zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    inputs, grad = leaves(dtype=dtype)
    found = index_scores.scores(*inputs)
    expected = (found, *torch.autograd.grad(found, inputs, grad))

    with torch.autocast("cpu", torch.bfloat16):
        under = index_scores.scores(*inputs)
        seen = (under, *torch.autograd.grad(under, inputs, grad))

    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))


@pytest.mark.unmeasured
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch 2.15 says it of its own
@pytest.mark.parametrize("layout", ["contiguous", "batch first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pytorch_s_own_checks_of_an_operator_pass(layout: str, dtype: torch.dtype) -> None:
    q, weights, k, grad = random(7, 6, 7, 2, 3, 8, dtype=dtype)
    q, weights, k = lay_out(layout, q, weights, k)

    torch.library.opcheck(index_scores._gradients, (grad, q, weights, k, True))
    torch.library.opcheck(index_scores._scores, (*[each.requires_grad_() for each in (q, weights, k)], False))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_dtypes_and_strides_of_meta_tensors_are_those_of_results(layout: str, dtype: torch.dtype) -> None:
    q, weights, k, grad = random(8, 6, 7, 2, 3, 8, dtype=dtype)
    q, weights, k = lay_out(layout, q, weights, k)
    real = (index_scores.scores(q, weights, k), *index_scores.gradients(grad, q, weights, k))

    fakes = [each.to("meta") for each in (grad, q, weights, k)]
    announced = (index_scores.scores(*fakes[1:]), *index_scores.gradients(fakes[0], *fakes[1:]))

    def described(tensor: torch.Tensor) -> Any:
        return tensor.dtype, tensor.shape, tensor.stride()

    assert [described(each) for each in announced] == [described(each) for each in real]


@pytest.mark.unmeasured
def test_a_compiled_step_gives_the_same_bits() -> None:
    inputs, grad = leaves()
    expected = torch.autograd.grad((index_scores.scores(*inputs, use_relu=False) * 2).exp(), inputs, grad)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Any, weights: Any, k: Any) -> Any:
        return (index_scores.scores(q, weights, k, use_relu=False) * 2).exp()

    found = torch.autograd.grad(step(*inputs), inputs, grad)

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


SHAPES = {"q": (6, 2, 3, 8), "weights": (6, 2, 3), "k": (7, 2, 8)}


@pytest.mark.parametrize(
    "changed",
    [
        {"q": (6, 2, 8)},
        {"q": (5, 2, 3, 8)},
        {"q": (6, 2, 3, 9)},
        {"weights": (6, 2, 3, 1)},
        {"weights": (6, 3, 2)},
        {"weights": (6, 2)},
        {"k": (7, 1, 8)},
        {"k": (7, 2, 1, 8)},
        {"k": (8,)},
        {"k": ()},
    ],
    ids=str,
)
def test_shapes_that_do_not_belong_together_are_refused_by_name(changed: dict[str, tuple[int, ...]]) -> None:
    shapes = {**SHAPES, **changed}
    given = [torch.zeros(shape) for shape in shapes.values()]

    for call in (index_scores.scores, lambda *all_three: index_scores.gradients(torch.zeros(2, 6, 7), *all_three)):
        with pytest.raises(ValueError, match=r"q, weights and k must be .*queries, batch, heads, dim") as refusal:
            call(*given)
        assert all(str(shape) in str(refusal.value) for shape in shapes.values())


@pytest.mark.parametrize("shape", [(6, 2, 7), (2, 7, 6), (2, 6, 1), (2, 6), ()], ids=str)
def test_a_gradient_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    given = [torch.zeros(each) for each in SHAPES.values()]

    with pytest.raises(ValueError, match=r"grad must be .* = \(2, 6, 7\)") as refusal:
        index_scores.gradients(torch.zeros(shape), *given)
    assert str(shape) in str(refusal.value)


# Which way is taken.


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return the name of the module that computes, on a host that pretends to have a device."""
    pytest.importorskip("triton")
    index_scores.implementation.cache_clear()

    def name(
        q: torch.dtype = torch.bfloat16,
        k: torch.dtype = torch.bfloat16,
        dim: int = 128,
        device: torch.device = CUDA,
        found: str = "H200",
        hip: str | None = None,
    ) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device=None: DEVICES[found])
        monkeypatch.setattr(torch.version, "hip", hip)
        chosen: str = index_scores.implementation(q, k, dim, device).__name__
        return chosen.rpartition(".")[2].removeprefix("in_")

    yield name
    index_scores.implementation.cache_clear()


LARGEST_DIM = {"T4": 0, "A100": 256, "RTX 4090": 128, "H200": 256, "B200": 256, "RTX 5090": 128}


@pytest.mark.parametrize("found", DEVICES)
def test_tensor_cores_are_taken_for_bfloat16_up_to_the_dim_that_a_device_has_room_for(
    way: Callable[..., str], found: str
) -> None:
    dims = (1, 16, 64, 80, 128, 129, 192, 256, 257, 512)
    assert [dim for dim in dims if way(found=found, dim=dim) == "triton"] == [
        dim for dim in dims if dim <= LARGEST_DIM[found]
    ]


@pytest.mark.parametrize("found", DEVICES)
def test_tensor_cores_are_never_taken_on_amd_devices(way: Callable[..., str], found: str) -> None:
    assert {way(found=found, dim=dim, hip="6.4") for dim in (64, 128, 256)} == {"streaming"}


@pytest.mark.parametrize(
    "odd",
    [
        {"device": CPU},
        {"q": torch.float16, "k": torch.float16},
        {"q": torch.float32, "k": torch.float32},
        {"q": torch.float32},
        {"k": torch.float32},
    ],
    ids=str,
)
def test_all_else_is_streamed(way: Callable[..., str], odd: dict[str, Any]) -> None:
    assert way(**odd) == "streaming"


def test_the_choice_is_made_once(way: Callable[..., str]) -> None:
    assert way() == "triton"
    assert way(found="T4") == "triton"
    assert index_scores.implementation.cache_info().misses == 1


def test_without_triton_all_is_streamed(run_python: Callable[..., CompletedProcess[str]]) -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from megacpp_overlays.kernels.index_scores import function as index_scores\n"
        "one = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)\n"
        "print(index_scores.implementation(one.dtype, one.dtype, 2, torch.device('cuda')).__name__)\n"
        "print(index_scores.scores(one, one[..., 0], one[0]).item())"
    )
    assert run_python(code, ROOT, after=warm_python.TORCH).stdout.split() == [index_scores_streaming.__name__, "2.0"]


# Tensor cores, each in one interpreter of its own.


# Programs compiled for real devices.


COMPILED = {
    "89:64": "RTX 4090",
    "89:128": "RTX 4090",
    "120:128": "RTX 5090",
    "80:256": "A100",
    "90:128": "H200",
    "90:256": "H200",
    "100:256": "B200",
}
"""Architecture and dim, and its device: for each amount of shared memory, the dims that need the most of it."""
TENSOR_MEMORY = 512
"""Columns of tensor memory of one processor of capability 10."""


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    """Return the results of `index_scores_targets.py`: for each case, the resources of each kernel."""
    return compiled_programs.needs("index_scores_targets.py", *COMPILED)


@pytest.mark.parametrize("case", COMPILED)
def test_kernels_fit_the_devices_they_are_chosen_for(
    way: Callable[..., str], programs: dict[str, Any], case: str
) -> None:
    device = DEVICES[COMPILED[case]]
    architecture, _, dim = case.partition(":")
    assert int(architecture) == 10 * device.major + device.minor
    assert way(found=COMPILED[case], dim=int(dim)) == "triton"

    needs = programs[case]

    assert {each["kernel"] for each in needs} >= {"score_tiles", "query_side", "key_side"}
    assert [each for each in needs if each["shared"] > device.shared_memory_per_block_optin] == []
    assert [each for each in needs if each["tensor_memory"] > TENSOR_MEMORY] == []


# Results in Triton's interpreter, on the CPU.


@pytest.fixture(scope="module")
def facts(grid_size: str) -> dict[str, Any]:
    """Return the results of `index_scores_facts.py`. No kernel runs on a device."""
    pytest.importorskip("triton")
    return kept_answers.answer("index_scores_facts.py", grid_size, TRITON_INTERPRET="1")


def test_the_interpreter_takes_the_tensor_core_way(facts: dict[str, Any]) -> None:
    assert facts["way"] == "megacpp_overlays.kernels.index_scores.in_triton"


def test_kernels_give_whole_numbers_exactly(facts: dict[str, Any]) -> None:
    """But for the last bit of a bfloat16 gradient, which the interpreter cuts off where a device rounds."""
    assert {name: wrong for name, wrong in facts["whole_numbers"].items() if wrong} == {}


def test_kernels_are_as_close_as_float32_sums_are(facts: dict[str, Any]) -> None:
    assert {name: shares for name, shares in facts["random_numbers"].items() if max(shares.values()) > 1} == {}


@pytest.mark.parametrize("parts", ["1", "2", "3", "8"])
def test_queries_may_be_cut_into_parts_for_the_gradient_of_the_keys(facts: dict[str, Any], parts: str) -> None:
    assert facts["parts"][parts] == []


def test_kernels_give_nothing_for_nothing(facts: dict[str, Any]) -> None:
    assert facts["empty"] == {"queries": [], "keys": [], "batch": [], "heads": [], "dim": []}


def test_kernels_keep_a_nan_in_the_scores(facts: dict[str, Any]) -> None:
    assert facts["nan_in_the_scores"] == [[0, 1, key] for key in range(5)]


@pytest.mark.parametrize("spoilt", SPOILS)
def test_kernels_let_a_gradient_that_is_not_finite_reach_its_query_and_its_key_and_nothing_else(
    facts: dict[str, Any], spoilt: str
) -> None:
    assert facts["spoilt_gradients"][spoilt] == {}


def test_kernels_take_every_magnitude(facts: dict[str, Any]) -> None:
    assert {name: bad for name, bad in facts["magnitudes"].items() if bad} == {}


def test_a_small_gradient_next_to_a_large_one_is_not_lost(facts: dict[str, Any]) -> None:
    assert facts["small_beside_large"] < 2**-7


@pytest.mark.parametrize("power", ["-60", "60"])
def test_a_power_of_two_in_the_gradient_changes_no_digit(facts: dict[str, Any], power: str) -> None:
    assert facts["same_digits_for_a_scaled_gradient"][power] == [True, True, True]


@pytest.mark.parametrize("tile", ["tile 0", "tile 1", "tile 2"])
def test_queries_lose_no_digit_to_a_larger_gradient_in_another_tile(facts: dict[str, Any], tile: str) -> None:
    assert facts["same_digits_beside_a_large_tile"][tile] == [True, True]


def test_the_common_part_of_keys_cancels(facts: dict[str, Any]) -> None:
    assert len(facts["cancellation"]) == 4
    assert {case: times for case, times in facts["cancellation"].items() if times > 1.1} == {}


def test_kernels_give_the_same_bits_again(facts: dict[str, Any]) -> None:
    assert facts["rerun"] is True
