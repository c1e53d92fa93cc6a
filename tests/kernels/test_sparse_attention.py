"""Attention over chosen keys: blocks in PyTorch, tensor cores in Triton's interpreter, and the operators."""

from __future__ import annotations

from typing import Any
from unittest import mock

import kept_answers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from releases import only
from sparse_attention_cases import FEW, GRID, PEAKED, Entry, errors, in_dtype, inputs, results
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_overlays import variables
from megacpp_overlays.kernels.sparse_attention import function, in_torch, reference

SIZES = st.builds(
    Entry,
    queries=st.integers(1, 5),
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    dim=st.integers(2, 9),
    keys=st.integers(1, 12),
    slots=st.integers(0, 9),
    value=st.integers(1, 2),
    sink=st.booleans(),
    bias=st.booleans(),
    indices=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    strided=st.booleans(),
    sharpness=st.just(1.0),
    ahead=st.just(0.0),
    common=st.just(0.0),
)


# The truth.


def test_the_reference_is_the_formula() -> None:
    made = inputs(Entry(3, 2, 2, 4, 6, 5, 3, sink=True, bias=True, dtype=torch.float64))["given"]

    output, lse = reference.attend(**made)

    for query, element, head in ((1, 0, 0), (2, 1, 1)):
        places = [int(each) for each in made["indices"][element, query] if 0 <= each < 6]
        slots = [slot for slot, each in enumerate(made["indices"][element, query]) if 0 <= each < 6]
        products = [made["query"][query, element, head] @ made["key"][place, element, 0] for place in places]
        scores = [
            each * made["scale"] + made["bias"][element, query, slot]
            for each, slot in zip(products, slots, strict=True)
        ]
        total = sum(each.exp() for each in scores) + made["sink"][head].double().exp()
        mean = sum(
            each.exp() / total * made["key"][place, element, 0, :3] for each, place in zip(scores, places, strict=True)
        )
        assert torch.allclose(output[query, element, head], mean, rtol=1e-12)
        assert float(lse[query, element, head]) == pytest.approx(float(total.log()), rel=1e-12)


# Blocks in PyTorch.


@settings(deadline=None, max_examples=150)
@given(entry=SIZES, seed=st.integers(0, 2**31), block=st.sampled_from([1, 30, 1 << 22]))
def test_blocks_are_as_close_to_the_truth_as_float32_is(entry: Entry, seed: int, block: int) -> None:
    made = inputs(entry, seed)

    with mock.patch.object(in_torch, "_BLOCK_ELEMENTS", block):
        found = results(function.attend, made, None)

    true = results(reference.attend, made, torch.float64)
    assert torch.equal(found["finite"], true["finite"])
    for name, error in errors(found, true).items():
        assert error < 1e-4, name
        assert found[name].shape == true[name].shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PEAKED)
def test_peaked_attention_is_rounded_no_more_than_pytorch_rounds_it(name: str, dtype: torch.dtype) -> None:
    made = inputs(PEAKED[name]._replace(dtype=dtype))

    found = results(function.attend, made, None)

    true = results(reference.attend, made, torch.float64)
    plain = errors(results(in_dtype, made, None), true)
    for tensor, error in errors(found, true).items():
        assert error <= max(1.1 * plain[tensor], 3e-7), tensor  # a few float32 numbers further


def test_of_a_row_that_one_key_has_to_itself_no_score_has_a_gradient() -> None:
    made = inputs(Entry(4, 1, 4, 32, 20, 10, 24, dtype=torch.float32, ahead=200))
    made["above_lse"].zero_()

    found = results(function.attend, made, None)

    assert float(found["of query"].abs().max()) == 0.0


@pytest.mark.parametrize(
    ("learns", "enabled"), [((), True), (("query",), False), (("query",), True), (("key",), True), (("sink",), True)]
)
def test_the_remainder_is_computed_only_for_a_backward_pass(learns: tuple[str, ...], enabled: bool) -> None:
    made = inputs(Entry(3, 1, 2, 16, 8, 4, 16, sink=True, dtype=torch.float32))["given"]
    for name in learns:
        made[name].requires_grad_()

    with mock.patch.object(function, "_attend", wraps=function._attend) as called, torch.set_grad_enabled(enabled):
        function.attend(**made)

    assert called.call_args.args[-1] is (enabled and bool(learns))


def test_a_key_chosen_twice_counts_twice_and_an_index_of_no_key_does_not_count() -> None:
    query, key = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 1, 2, 4), (3, 1, 1, 4)))

    twice, _ = function.attend(query, key, torch.tensor([[[1, 1, 2]]]), 1.0, 4)
    outside, _ = function.attend(query, key, torch.tensor([[[1, 3, 2, -1, -7, 2**31 - 1]]]), 1.0, 4)

    weights = torch.exp(query[0, 0] @ key[1:, 0, 0].T)
    for found, counts in ((twice, (2.0, 1.0)), (outside, (1.0, 1.0))):
        shares = weights * torch.tensor(counts, dtype=torch.float64)
        mean = shares / shares.sum(dim=1, keepdim=True) @ key[1:, 0, 0]
        assert torch.allclose(found[0, 0], mean, rtol=1e-12, atol=1e-12)


def test_queries_that_chose_nothing_get_zeros_and_no_gradient_is_not_a_number() -> None:
    query = torch.randn(2, 1, 3, 8, requires_grad=True)
    key = torch.full((4, 1, 1, 8), float("nan"))
    key[1] = 1.0
    key.requires_grad_()

    output, lse = function.attend(query, key, torch.tensor([[[-1, -1], [1, -1]]]), 1.0, 8)
    output.sum().backward()

    assert torch.equal(output[0], torch.zeros(1, 3, 8))
    assert torch.equal(lse[0], torch.full((1, 3), float("-inf")))
    assert torch.isfinite(query.grad).all()
    assert torch.equal(key.grad[[0, 2, 3]], torch.zeros(3, 1, 1, 8))


def test_blocks_in_pytorch_give_the_same_bits_again_on_several_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(size, 1, heads, 64, generator=generator) for size, heads in ((64, 2), (16, 1)))
    query, key = query.requires_grad_(), key.requires_grad_()
    chosen = torch.randint(16, (1, 64, 512), generator=generator)  # each key 2048 times

    def gradient() -> torch.Tensor:
        output, _ = function.attend(query, key, chosen, 0.1, 64)
        return torch.autograd.grad(output.square().sum(), key)[0]

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, *others = (gradient() for _ in range(6))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, each) for each in others)


def test_no_operator_returns_a_tensor_of_queries_heads_and_keys() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                largest = max(largest, each.numel() if isinstance(each, torch.Tensor) else 0)
            return result

    made = inputs(Entry(64, 1, 8, 8, 512, 4, 8, dtype=torch.float32))

    with Watch():
        results(function.attend, made, None)

    assert 512 * 8 <= largest < 64 * 8 * 512


# Tensor cores in Triton's interpreter.


@pytest.fixture(scope="module")
def interpreted(grid_size: str) -> dict[str, Any]:
    """Results of the kernels in Triton's interpreter, in a process of their own."""
    return kept_answers.answer("sparse_attention_cases.py", "cpu", grid_size, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", only(GRID, FEW))
def test_kernels_are_as_close_to_the_truth_as_their_dtype_is(interpreted: dict[str, Any], name: str) -> None:
    facts = interpreted[name]
    bound = 2e-3 if GRID[name].dtype == torch.float16 else 1.5e-2  # the interpreter cuts bfloat16

    assert facts["module"] == "in_triton"
    assert facts["errors"].pop("finite") == 0
    assert facts["errors"].pop("lse") < (bound if GRID[name].scales else 1e-5)  # scaled numbers are rounded
    assert all(error < bound for error in facts["errors"].values()), facts["errors"]


@pytest.mark.parametrize("name", only(PEAKED, FEW))
def test_kernels_round_peaked_attention_no_more_than_pytorch_does(interpreted: dict[str, Any], name: str) -> None:
    for tensor, error in interpreted[name]["kernels"].items():
        assert error <= max(1.1 * interpreted[name]["PyTorch"][tensor], 3e-7), tensor


def test_kernels_keep_rounding_errors_if_a_gradient_is_required(interpreted: dict[str, Any]) -> None:
    numbers = interpreted["a third result"]

    assert numbers["kept"] == numbers["outputs"] > 0
    assert numbers["kept in vain"] == 0


@pytest.mark.parametrize("name", only(GRID, FEW))
def test_kernels_give_the_same_bits_again(interpreted: dict[str, Any], name: str) -> None:
    assert interpreted[name]["again"]


@pytest.mark.parametrize(
    "name", only([name for name, entry in GRID.items() if entry.scales and entry.dtype == torch.float16], FEW)
)
def test_kernels_read_quantized_keys_as_the_numbers_that_they_stand_for(interpreted: dict[str, Any], name: str) -> None:
    assert interpreted[name]["as opened"]


# Operators.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # opcheck of torch 2.15 asks for it
def test_operators_pass_the_checks_of_torch() -> None:
    made = inputs(Entry(3, 2, 2, 8, 6, 4, 5, sink=True, bias=True, dtype=torch.float32))["given"]
    arguments = [
        each.requires_grad_() if isinstance(each, torch.Tensor) and name in {"query", "key", "sink"} else each
        for name, each in made.items()
    ]

    torch.library.opcheck(torch.ops.megacpp_overlays.sparse_attention.default, tuple(arguments))


def test_torch_compile_sees_one_graph() -> None:
    made = inputs(Entry(3, 2, 2, 8, 6, 4, 5, dtype=torch.float32))
    given, above = made["given"], made["above"]

    def loss(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        output, _ = function.attend(query, key, given["indices"], given["scale"], 5)
        return (output * above).sum()

    found = []
    for each in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        query, key = given["query"].clone().requires_grad_(), given["key"].clone().requires_grad_()
        found.append([value := each(query, key), *torch.autograd.grad(value, (query, key))])
    for plain, compiled in zip(*found, strict=True):
        assert torch.equal(plain, compiled)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query": torch.zeros(3, 2, 8)}, "query and key must be"),
        ({"key": torch.zeros(6, 2, 2, 8)}, "query and key must be"),
        ({"key": torch.zeros(6, 2, 1, 9)}, "query and key must be"),
        ({"key": torch.zeros(0, 2, 1, 8)}, "key must have at least one key"),
        ({"indices": torch.zeros(3, 2, 4, dtype=torch.int64)}, "indices must be (batch, queries, slots)"),
        ({"indices": torch.zeros(2, 3, 4)}, "indices must be int32 or int64, not torch.float32"),
        ({"value_channels": 9}, "value_channels must be from 1 to dim = 8, not 9"),
        ({"value_channels": 0}, "value_channels must be from 1"),
        ({"sink": torch.zeros(3)}, "sink must be (heads,) = (2,)"),
        ({"bias": torch.zeros(2, 3, 5)}, "bias must be of the shape of indices"),
        ({"sink": torch.zeros(2, device="meta")}, "all tensors must be on one device, not on cpu and meta"),
    ],
)
def test_inconsistent_arguments_are_named(changes: dict[str, Any], says: str) -> None:
    made = inputs(Entry(3, 2, 2, 8, 6, 4, 5, dtype=torch.float32))["given"] | changes

    with pytest.raises(ValueError) as error:  # noqa: PT011 - the sentence is tested below
        function.attend(**made)

    assert says in str(error.value)


def test_choices_are_checked_for_debugging() -> None:
    good = torch.tensor([[[2, 0, -1], [1, -1, -1]]])

    function.check_choices(good, 3)

    with pytest.raises(ValueError, match="batch element 0, query 1: index 3 is neither -1 nor one of 3 keys"):
        function.check_choices(torch.tensor([[[2, 0, -1], [3, -1, -1]]]), 3)
    with pytest.raises(ValueError, match="batch element 0, query 0: index 2 is chosen twice"):
        function.check_choices(torch.tensor([[[2, 0, 2], [1, -1, -1]]]), 3)


def test_a_call_checks_its_choices_where_the_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = inputs(Entry(3, 2, 2, 8, 6, 1, 5, dtype=torch.float32))["given"]
    made["indices"] = torch.tensor([[[0], [-1], [5]], [[1], [2], [77]]])

    function.attend(**made)

    monkeypatch.setitem(variables._of_this_process, variables.SPARSE_ATTENTION_CHOICES.name, "check")
    with pytest.raises(ValueError, match="batch element 1, query 2: index 77 is neither -1 nor one of 6 keys"):
        function.attend(**made)
