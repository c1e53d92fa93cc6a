"""Attention over keys that are stored as FP8 numbers with scales: blocks in PyTorch, operators, and rejected arguments.

Tensor cores are in `test_sparse_attention.py`, whose grid has quantized keys, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import compiled_programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_attention_cases import Entry, errors, inputs, results
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_overlays.kernels.sparse_attention import function, in_torch, packed, reference
from megacpp_overlays.kernels.sparse_attention.quantized_keys import QuantizedKeys

SIZES = st.builds(
    Entry,
    queries=st.integers(1, 4),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.one_of(st.integers(2, 9), st.integers(126, 130), st.integers(255, 260)),
    keys=st.integers(1, 9),
    slots=st.integers(0, 7),
    value=st.integers(1, 2),
    sink=st.booleans(),
    bias=st.booleans(),
    indices=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    strided=st.booleans(),
    scales=st.sampled_from(["all", "key", "blocks"]),
    sharpness=st.just(1.0),
    ahead=st.just(0.0),
    common=st.just(0.0),
)
SMALL = Entry(3, 2, 2, 8, 6, 4, 5, sink=True, bias=True, dtype=torch.float32, scales="key")


def small(**changes: Any) -> dict[str, Any]:
    made = inputs(SMALL)["given"]
    return made | {"key": dataclasses.replace(made["key"], **changes)}


# Dequantization.


def test_each_bit_pattern_is_decoded_to_its_number() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    fraction, power = (bits & 7).double(), ((bits >> 3) & 15).double()
    numbers = torch.where(power > 0, (1 + fraction / 8) * 2 ** (power - 7), fraction / 8 * 2.0**-6)
    numbers = torch.where(bits & 127 == 127, torch.nan, numbers) * torch.where(bits >= 128, -1.0, 1.0)
    for data in (bits, bits.view(torch.float8_e4m3fn)):
        found = QuantizedKeys(data.view(1, 1, 1, 256), torch.tensor(0.5)).opened(torch.float64)

        assert torch.equal(found.flatten().nan_to_num(-1e9), (numbers / 2).nan_to_num(-1e9))


def test_a_block_of_128_channels_shares_a_scale_and_the_last_block_may_be_short() -> None:
    ones = torch.ones(2, 1, 1, 300).to(torch.float8_e4m3fn)
    scale = torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]])

    found = QuantizedKeys(ones, scale).opened(torch.bfloat16)

    assert found.dtype == torch.bfloat16
    for key in (0, 1):
        parts = found[key, 0, 0].split(128)
        assert [part.unique().tolist() for part in parts] == [[3.0 * key + each] for each in (1, 2, 3)]


# Blocks in PyTorch.


@settings(deadline=None, max_examples=100)
@given(entry=SIZES, seed=st.integers(0, 2**31), block=st.sampled_from([1, 300, 1 << 22]))
def test_blocks_are_as_close_to_the_truth_as_float32_is(entry: Entry, seed: int, block: int) -> None:
    made = inputs(entry, seed)

    with mock.patch.object(in_torch, "_BLOCK_ELEMENTS", block):
        found = results(function.attend, made, None)

    true = results(reference.attend, made, torch.float64)
    assert torch.equal(found["finite"], true["finite"])
    for name, error in errors(found, true).items():
        assert error < 1e-4, name
        assert found[name].shape == true[name].shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_and_numbers_are_the_same_keys(dtype: torch.dtype) -> None:
    made = inputs(SMALL._replace(dtype=dtype))
    given = made["given"]
    bits = dataclasses.replace(given["key"], data=given["key"].data.view(torch.uint8))

    found = [results(function.attend, made | {"given": given | {"key": each}}, None) for each in (given["key"], bits)]

    assert all(torch.equal(each, found[1][tensor]) for tensor, each in found[0].items())


@pytest.mark.parametrize("scales", ["all", "key", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_are_those_of_the_opened_keys_to_the_bit(dtype: torch.dtype, scales: str) -> None:
    """A product of an FP8 number and its scale is rounded to the dtype of the query, as dequantization rounds it."""
    given = inputs(SMALL._replace(dtype=dtype, dim=140, scales=scales))["given"]
    keys = dataclasses.replace(given["key"], scale=given["key"].scale * 1.2345)  # no few bits
    learner = torch.zeros(keys.data.shape, dtype=dtype, requires_grad=True)
    plain = keys.opened(dtype).detach().requires_grad_()
    query = given["query"].detach().requires_grad_()
    assert dtype == torch.float32 or not torch.equal(plain.float(), keys.opened(torch.float32))

    found = []
    for key, leaf in ((dataclasses.replace(keys, gradient_for=learner), learner), (plain, plain)):
        results = function.attend(**(given | {"query": query, "key": key}))
        found.append([*results, *torch.autograd.grad(results[0].float().square().sum(), (query, leaf))])

    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_no_operator_returns_keys_that_were_opened_or_gathered_whole() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                if isinstance(each, torch.Tensor) and each.dtype.itemsize > 1:
                    largest = max(largest, each.numel())
            return result

    queries, keys, slots, dim = 64, 2048, 4, 130
    made = inputs(Entry(queries, 1, 2, dim, keys, slots, 8, dtype=torch.bfloat16, scales="blocks"))
    given = made["given"]
    bits, scales = given["key"].data.view(torch.uint8), given["key"].scales()
    # A dispatch mode does not see the inside of an operator, so the operator's own function is called.
    with mock.patch.object(in_torch, "_BLOCK_ELEMENTS", 8 * slots * dim), Watch():
        in_torch.forward(given["query"], bits, given["indices"], given["scale"], 8, None, None, scales)

    assert 8 * slots * dim <= largest < queries * slots * dim < keys * dim


def test_packed_rows_take_scales_without_the_axis_of_a_batch() -> None:
    made = inputs(Entry(4, 1, 2, 140, 6, 3, 5, dtype=torch.float32, scales="blocks"))["given"]
    keys = made["key"]
    row = {
        "query": made["query"][:, 0],
        "indices": made["indices"][0],
        "cu_seqlens_q": torch.tensor([0, 4]),
        "cu_seqlens_k": torch.tensor([0, 6]),
        "scale": made["scale"],
        "value_channels": 5,
    }
    expected, _ = function.attend(**made)
    whole = QuantizedKeys(keys.data[:, 0], torch.tensor([0.25]))
    same = dataclasses.replace(keys, scale=torch.tensor(0.25))
    learner = torch.zeros(6, 1, 140, requires_grad=True)

    found, _ = packed.attend(key=QuantizedKeys(keys.data[:, 0], keys.scale[:, 0], learner), **row)
    of_all, _ = packed.attend(key=whole, **row)
    of_key, _ = packed.attend(key=dataclasses.replace(whole, scale=torch.full((6,), 0.25)), **row)
    found.sum().backward()

    assert torch.equal(found, expected[:, 0])
    assert torch.equal(of_all, function.attend(**(made | {"key": same}))[0][:, 0])
    assert torch.equal(of_key, of_all)
    assert learner.grad is not None
    assert learner.grad.count_nonzero() > 0


# Gradients.


def test_the_gradient_goes_to_the_tensor_that_is_named_in_its_dtype() -> None:
    learner = torch.full((6, 2, 1, 8), torch.nan, dtype=torch.bfloat16, requires_grad=True)
    given = small(gradient_for=learner)
    plain = given | {"key": given["key"].opened(torch.float32).detach().requires_grad_()}

    for each in (given, plain):
        output, _ = function.attend(**each)
        output.sum().backward()

    assert learner.grad is not None
    assert torch.equal(learner.grad, plain["key"].grad.bfloat16())


def test_a_query_learns_where_keys_do_not() -> None:
    given = small()
    given["query"].requires_grad_()

    function.attend(**given)[0].sum().backward()

    assert given["query"].grad.count_nonzero() > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # opcheck of torch 2.15 asks for it
def test_operators_pass_the_checks_of_torch() -> None:
    given = inputs(SMALL)["given"]
    keys, learner = given.pop("key"), torch.zeros(6, 2, 1, 8, requires_grad=True)
    leaves = [given.pop("query").requires_grad_(), keys.data.view(torch.uint8)]

    arguments = (*leaves, *given.values(), keys.scales(), learner)
    torch.library.opcheck(torch.ops.megacpp_overlays.sparse_attention.default, arguments)


def test_torch_compile_sees_one_graph() -> None:
    given = inputs(SMALL)["given"]
    keys = given["key"]

    def loss(query: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, learner: torch.Tensor) -> torch.Tensor:
        output, _ = function.attend(**(given | {"query": query, "key": QuantizedKeys(data, scale, learner)}))
        return output.square().sum()

    found = []
    for each in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        query, learner = given["query"].clone().requires_grad_(), torch.zeros(6, 2, 1, 8, requires_grad=True)
        value = each(query, keys.data, keys.scale, learner)
        found.append([value, *torch.autograd.grad(value, (query, learner))])
    for plain, compiled in zip(*found, strict=True):
        assert torch.equal(plain, compiled)


# Rejected arguments.


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (
            {"data": torch.zeros(6, 2, 1, 8)},
            TypeError,
            "data of quantized keys must be float8_e4m3fn, or uint8 of its bits",
        ),
        (
            {"data": torch.zeros(6, 2, 1, 8).to(torch.float8_e5m2)},
            TypeError,
            "not torch.float8_e5m2; give keys of another dtype as they are, or dequantize them",
        ),
        (
            {"scale": torch.ones(6, 2).bfloat16()},
            TypeError,
            "must be float32, not torch.bfloat16; convert it with .float()",
        ),
        ({"gradient_for": torch.zeros(6, 2, 1, 8).int()}, TypeError, "must be floating, not torch.int32; leave it out"),
        (
            {"data": torch.zeros(6, 8, dtype=torch.uint8)},
            ValueError,
            "data of quantized keys must be (keys, batch, 1, dim)",
        ),
        ({"scale": torch.ones(12)}, ValueError, "must be () for all, (6, 2) for a key each or (6, 2, 1) for blocks"),
        ({"scale": torch.ones(6, 1)}, ValueError, "not (6, 1); a scale for each row of (keys * batch)"),
        ({"scale": torch.ones(6, 2, 2)}, ValueError, "not (6, 2, 2)"),
        (
            {"gradient_for": torch.zeros(6, 2, 8)},
            ValueError,
            "must be of the shape of data, (6, 2, 1, 8), not (6, 2, 8)",
        ),
        (
            {"data": torch.zeros(6, 1, 1, 8, dtype=torch.uint8), "scale": torch.ones(1)},
            ValueError,
            "query and key must be",
        ),
        ({"scale": torch.ones(6, 2, device="meta")}, ValueError, "on one device, not on cpu and meta"),
        ({"gradient_for": torch.zeros(6, 2, 1, 8, device="meta")}, ValueError, "on one device, not on cpu and meta"),
    ],
)
def test_inconsistent_arguments_are_named(changes: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as error:
        function.attend(**small(**changes))

    assert says in str(error.value)


def test_queries_of_8_bits_are_refused() -> None:
    given = small()

    with pytest.raises(TypeError, match="queries of quantized keys must have 16 bits or more"):
        function.attend(**(given | {"query": given["query"].to(torch.float8_e4m3fn)}))


# Compiled for Hopper, on any host.

COMPILED = ("16:576:512:0:1", "64:512:512:1:4", "64:640:640:0:5", "64:192:128:1:2")


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    """Results of `sparse_attention_targets.py`."""
    return compiled_programs.needs("sparse_attention_targets.py", *COMPILED, MEGACPP_OVERLAYS="off")


@pytest.mark.parametrize("case", COMPILED)
def test_hopper_can_run_the_kernels_that_read_quantized_keys(programs: dict[str, Any], case: str) -> None:
    needs = programs[case]

    assert {"attend_rows", "query_side"} <= {each["kernel"] for each in needs}
    assert [each for each in needs if each["shared"] > compiled_programs.SHARED_OF_HOPPER] == []
