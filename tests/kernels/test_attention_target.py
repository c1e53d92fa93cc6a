"""Attention probabilities summed over heads: blocks in PyTorch, tensor cores in Triton's interpreter, the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import compiled_programs
import kept_answers
import pytest
import torch
from attention_target_cases import SIZES, VALID, inputs, seen, share, truth, valid_of
from hypothesis import given, settings
from hypothesis import strategies as st
from index_scores_cases import DEVICES
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_overlays.kernels.attention_target import blocks, reference, streaming
from megacpp_overlays.kernels.attention_target import function as attention_target
from megacpp_overlays.kernels.attention_target.validity import validity

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAMES = ("starts", "ends", "key_positions", "mask", "topk_indices")
SMALL = (7, 9, 2, 3, 8)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Keep tiny operators from waiting for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The truth.


def test_the_reference_is_the_formula() -> None:
    query, key = inputs(0, 3, 4, 2, 2, 5, torch.float64)
    valid = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    mask = torch.arange(12.0).view(3, 4).double()

    found = reference.target(query, key, 0.3, valid.unsqueeze(0), mask.unsqueeze(0))

    for batch, row in ((0, 0), (1, 1), (0, 2)):
        total = [0.0] * 4
        for head in range(2):
            numbers = [
                float((query[row, batch, head] @ key[at, batch, head] * 0.3 + mask[row, at]).exp())
                * bool(valid[row, at])
                for at in range(4)
            ]
            total = [
                one + (number / sum(numbers) if number else 0.0) for one, number in zip(total, numbers, strict=True)
            ]
        assert found[batch, row].tolist() == pytest.approx(total, rel=1e-12)


# Blocks in PyTorch.


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 999),
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3), st.integers(1, 9)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    shared=st.booleans(),
    kind=st.sampled_from(VALID),
    block=st.sampled_from([1, 7, 40, 1 << 22]),
)
def test_streaming_is_as_close_as_float32_sums_are(
    seed: int, sizes: tuple[int, ...], dtype: torch.dtype, shared: bool, kind: str, block: int
) -> None:
    query, key = inputs(seed, *sizes, dtype=dtype, key_heads=1 if shared else None)
    valid = valid_of(kind, *sizes[:3])
    with mock.patch.object(blocks, "_BLOCK_ELEMENTS", block):
        found = attention_target.target(query, key, 0.4, **valid)

    assert (found.dtype, found.shape) == (torch.float32, (sizes[2], sizes[0], sizes[1]))
    assert share(found, query.float(), key.float(), 0.4, valid) <= 1
    visible = seen(valid, *sizes[:3])
    assert not found[~visible].any()


@pytest.mark.parametrize("kind", VALID)
def test_validity_is_the_conjunction_of_its_parts(kind: str) -> None:
    queries, keys, batch, *_ = SMALL
    valid = valid_of(kind, queries, keys, batch)
    found = validity(queries, keys, *(valid.get(name) for name in NAMES))
    expected = seen(valid, queries, keys, batch)

    assert torch.equal(found.of_rows(slice(None)).expand(batch, -1, -1), expected)
    assert torch.equal(found.of_rows(slice(2, 5)).expand(batch, -1, -1), expected[:, 2:5])
    places = torch.arange(keys)
    within = (places >= found.starts[..., None]) & (places < found.ends[..., None])
    assert not (expected & ~within).any()  # keys that kernels skip are not valid


def test_bounds_of_a_mask_are_tight() -> None:
    mask = torch.full((3, 6), -torch.inf)
    mask[0, 2:4] = mask[1, 0] = 0.0

    found = validity(3, 6, None, None, None, mask, None)

    assert (found.starts.tolist(), found.ends.tolist()) == ([[2, 0, 0]], [[4, 1, 0]])


class Largest(TorchDispatchMode):
    """Notes the most elements that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("kind", VALID)
def test_nothing_larger_than_the_result_is_made(kind: str) -> None:
    queries, keys, batch, heads, dim = 16, 20, 2, 8, 4
    query, key = inputs(1, queries, keys, batch, heads, dim)
    valid = valid_of(kind, queries, keys, batch)

    with mock.patch.object(blocks, "_BLOCK_ELEMENTS", 2 * batch * keys), Largest() as watch:
        streaming.target(query, key, 0.5, validity(queries, keys, *(valid.get(name) for name in NAMES)))

    assert 0 < watch.elements <= batch * queries * (keys + 16)


def test_a_rerun_gives_the_same_bits() -> None:
    query, key = inputs(2, 50, 60, 2, 5, 24)
    valid = valid_of("support and mask", 50, 60, 2)

    first, second = (attention_target.target(query, key, 0.2, **valid) for _ in range(2))

    assert torch.equal(first, second)


# The operator.


@pytest.mark.parametrize("kind", VALID)
def test_pytorch_s_own_checks_of_an_operator_pass(kind: str) -> None:
    query, key = inputs(3, *SMALL)
    valid = valid_of(kind, *SMALL[:3])
    arguments = (query, key, 0.3, *(valid.get(name) for name in NAMES))

    torch.library.opcheck(attention_target._target, arguments)


def test_a_compiled_call_is_one_graph_and_gives_the_same_bits() -> None:
    query, key = inputs(4, *SMALL)
    valid = valid_of("packed", *SMALL[:3])

    def double(query: Any, key: Any) -> Any:
        return 2 * attention_target.target(query, key, 0.3, **valid)

    compiled = torch.compile(double, backend="eager", fullgraph=True)

    assert torch.equal(compiled(query, key), double(query, key))


def test_autocast_changes_nothing() -> None:
    query, key = inputs(5, *SMALL, dtype=torch.float32)
    valid = valid_of("causal", *SMALL[:3])
    expected = attention_target.target(query, key, 0.3, **valid)

    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention_target.target(query, key, 0.3, **valid), expected)


WRONG: dict[str, dict[str, Any]] = {
    "another batch": {"key": torch.zeros(9, 3, 3, 8)},
    "another dim": {"key": torch.zeros(9, 2, 3, 7)},
    "other heads": {"key": torch.zeros(9, 2, 2, 8)},
    "three axes": {"key": torch.zeros(9, 2, 8)},
    "nothing valid is said": {"starts": None},
    "no ends": {"ends": None},
    "bounds of other rows": {"starts": torch.zeros(6, dtype=torch.int64)},
    "mask and bounds": {"mask": torch.zeros(7, 9)},
    "a mask of another size": {"starts": None, "ends": None, "mask": torch.zeros(7, 8)},
    "a mask of another batch": {"starts": None, "ends": None, "mask": torch.zeros(3, 7, 9)},
    "positions of other keys": {"key_positions": torch.arange(8)},
    "a support of other rows": {"topk_indices": torch.zeros(2, 6, 3, dtype=torch.int64)},
    "a support without batch": {"topk_indices": torch.zeros(7, 3, dtype=torch.int64)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_inconsistent_arguments_are_refused(wrong: str) -> None:
    query, key = inputs(6, *SMALL)
    given = {"query": query, "key": key, "scale": 0.3, **valid_of("causal", *SMALL[:3]), **WRONG[wrong]}

    with pytest.raises(ValueError, match=r"must be|is needed"):
        attention_target.target(**given)


# Which way is taken.


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return the name of the module that computes, on a host that pretends to have a device."""
    pytest.importorskip("triton")
    attention_target.implementation.cache_clear()

    def name(
        query: torch.dtype = torch.bfloat16,
        key: torch.dtype = torch.bfloat16,
        dim: int = 128,
        device: torch.device = CUDA,
        found: str = "H200",
        hip: str | None = None,
    ) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device=None: DEVICES[found])
        monkeypatch.setattr(torch.version, "hip", hip)
        chosen: str = attention_target.implementation(query, key, dim, device).__name__
        return chosen.rpartition(".")[2].removeprefix("in_")

    yield name
    attention_target.implementation.cache_clear()


@pytest.mark.parametrize("found", DEVICES)
def test_tensor_cores_are_taken_from_capability_8_on(way: Callable[..., str], found: str) -> None:
    expected = "streaming" if found == "T4" else "triton"
    for dtype in (torch.bfloat16, torch.float16):
        assert {way(dtype, dtype, dim=dim, found=found) for dim in (1, 64, 192, 576, 640)} == {expected}
    assert {way(dim=dim, found=found) for dim in (0, 641)} == {"streaming"}


@pytest.mark.parametrize(
    "odd",
    [
        {"device": CPU},
        {"query": torch.float32, "key": torch.float32},
        {"query": torch.float16},
        {"key": torch.float32},
        {"hip": "6.4"},
    ],
    ids=str,
)
def test_all_else_is_streamed(way: Callable[..., str], odd: dict[str, Any]) -> None:
    assert way(**odd) == "streaming"


# Tensor cores, each in one interpreter of its own.


COMPILED = {
    f"{10 * DEVICES[name].major + DEVICES[name].minor}:{dim}:{DEVICES[name].shared_memory_per_block_optin}": name
    for name, dim in (
        *(("A100", 192), ("RTX 4090", 128), ("RTX 4090", 192), ("RTX 4090", 576)),
        *(("H200", 128), ("H200", 192), ("B200", 192)),
    )
}
"""Architecture, dim and shared memory, and the device: the dims that need the most of it."""
TENSOR_MEMORY = 512
"""Columns of tensor memory of one processor of capability 10."""


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    """Return the resources of each kernel, for each case."""
    return compiled_programs.needs("attention_target_targets.py", *COMPILED)


@pytest.mark.parametrize("case", COMPILED)
def test_kernels_fit_the_devices_they_are_chosen_for(programs: dict[str, Any], case: str) -> None:
    device, needs = DEVICES[COMPILED[case]], programs[case]

    assert [each["kernel"] for each in needs] == ["row_sums", "sum_tiles"] * 3
    assert [each for each in needs if each["shared"] > device.shared_memory_per_block_optin] == []
    assert [each for each in needs if each["tensor_memory"] > TENSOR_MEMORY] == []


@pytest.mark.parametrize("case", COMPILED)
def test_one_program_answers_with_and_without_a_support(programs: dict[str, Any], case: str) -> None:
    """Megatron's tests compare the loss over all chosen keys with the dense one, by `==`."""
    causal, support, _ = (programs[case][first : first + 2] for first in (0, 2, 4))

    assert [each["program"] for each in causal] == [each["program"] for each in support]


@pytest.fixture(scope="module")
def facts(grid_size: str) -> dict[str, Any]:
    """Return the results of `attention_target_facts.py`."""
    pytest.importorskip("triton")
    return kept_answers.answer("attention_target_facts.py", grid_size, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def test_the_interpreter_takes_the_tensor_core_way(facts: dict[str, Any]) -> None:
    assert facts["way"].endswith("attention_target.in_triton")


def test_kernels_are_as_close_as_float32_sums_are(facts: dict[str, Any], grid_size: str) -> None:
    assert grid_size == "few" or len(facts["shares"]) >= len(SIZES) + 3 * len(VALID)
    assert {name: share for name, share in facts["shares"].items() if not share <= 1} == {}


@pytest.mark.parametrize("aspect", ["layouts", "spoilt", "nothing", "extremes"])
def test_kernels_are_right_about(facts: dict[str, Any], aspect: str) -> None:
    assert facts[aspect]
    assert [name for name, is_right in facts[aspect].items() if not is_right] == []


def test_streaming_and_truth_agree_where_kernels_are_asked() -> None:
    """Check the cases themselves: the expected values of the kernels are not all zeros."""
    for kind in VALID:
        query, key = inputs(1, *SIZES["odd"])
        valid = valid_of(kind, *SIZES["odd"][:3])
        true = truth(query, key, 0.1, valid)
        sees = seen(valid, *SIZES["odd"][:3]).any(dim=-1)
        assert torch.allclose(true.sum(dim=-1), SIZES["odd"][3] * sees.double())
        assert sees.any()
