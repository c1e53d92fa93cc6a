"""The k largest of each row: sorting in PyTorch, the kernel in Triton's interpreter and compiled, the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import compiled_programs
import kept_answers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_scores_cases import DEVICES
from top_k_cases import DTYPES, KINDS, chosen, definition, rows, some_of

from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.top_k import function as top_k
from megacpp_overlays.kernels.top_k import in_torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NUMBERS = st.sampled_from(
    [float("-inf"), -1e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 0.5, 1.0, 2.0, float("inf"), float("nan")]
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Keep tiny operators from waiting for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The definition.


def test_the_definition_by_examples() -> None:
    nan, inf = float("nan"), float("inf")

    assert chosen([3.0, 1.0, 2.0], 2) == [0, 2]  # in the order of positions
    assert chosen([1.0, 2.0, 1.0, 1.0], 2) == [0, 1]  # of equal numbers the first ones
    assert chosen([inf, 1.0, nan, nan], 2) == [0, 2]  # a NaN counts as infinity
    assert chosen([nan, nan, nan], 1) == [0]
    assert chosen([-0.0, 0.0, -0.0], 2) == [0, 1]  # zeros are equal
    assert chosen([-inf, 1.0, -inf, -inf], 3) == [0, 1, 2]
    assert chosen([-inf, 1.0, -inf, -inf], 3, mark_infinite=True) == [1, -1, -1]  # marks come last


@settings(deadline=None, max_examples=200)
@given(
    table=st.integers(1, 12).flatmap(lambda keys: st.lists(st.lists(NUMBERS, min_size=keys, max_size=keys), min_size=1, max_size=4)),
    part=st.floats(0, 1),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    marked=st.booleans(),
)  # fmt: skip
def test_the_choice_follows_the_definition(table: Any, part: float, dtype: torch.dtype, marked: bool) -> None:
    scores = torch.tensor(table, dtype=torch.float64).to(dtype)
    k = round(part * scores.size(-1))

    found = top_k.choose(scores, k, mark_infinite=marked)

    assert torch.equal(found, definition(scores, k, mark_infinite=marked))


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 999), kind=st.sampled_from(KINDS), keys=st.integers(1, 50), part=st.floats(0, 1))
def test_the_numbers_are_those_that_torch_chooses(seed: int, kind: str, keys: int, part: float) -> None:
    """As sets of positions where no numbers are equal, as sorted numbers where some are."""
    scores, k = rows(kind, 2, 3, keys, seed=seed), round(part * keys)

    found = top_k.choose(scores, k)
    numbers, places = scores.topk(k, dim=-1)

    taken = scores.gather(-1, found).sort(dim=-1, descending=True).values
    assert torch.equal(taken.nan_to_num(nan=torch.inf), numbers.nan_to_num(nan=torch.inf))
    if kind in {"normal", "sorted"}:
        assert torch.equal(found, places.sort(dim=-1).values)
    assert bool((found.diff(dim=-1) > 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_marks_are_those_that_megatron_makes(kind: str) -> None:
    """Since 0.19 it writes -1 over the positions of scores that are negative infinity."""
    scores = rows(kind, 6, 9)
    numbers, places = scores.topk(5, dim=-1)
    of_torch = places.masked_fill(numbers == -torch.inf, -1)

    found = top_k.choose(scores, 5, mark_infinite=True)

    assert torch.equal((found == -1).sum(dim=-1), (of_torch == -1).sum(dim=-1))
    unmarked = top_k.choose(scores, 5)
    where_found = (found >= 0) == (torch.arange(5) < (found >= 0).sum(dim=-1, keepdim=True))
    assert bool(where_found.all())
    assert torch.equal(found[found >= 0], unmarked[scores.gather(-1, unmarked) != -torch.inf])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_whole_numbers_are_taken_too(dtype: torch.dtype) -> None:
    scores = torch.tensor([[3, 1, 3, 0, 3]], dtype=dtype)

    assert top_k.choose(scores, 2).tolist() == [[0, 2]]
    assert top_k.choose(scores, 4, mark_infinite=True).tolist() == [[0, 1, 2, 4]]


@pytest.mark.parametrize(
    ("scores", "k"),
    [
        (torch.zeros(()), 0),
        (torch.zeros(2, 3), 4),
        (torch.zeros(2, 3), -1),
        (torch.zeros(2, 3, dtype=torch.complex64), 1),
        (torch.zeros(2, 3, dtype=torch.bool), 1),
    ],
    ids=["no axis", "more than a row has", "less than none", "complex", "flags"],
)
def test_scores_without_k_largest_are_refused(scores: Any, k: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        top_k.choose(scores, k)


# The operator.


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("shape", [(3, 9), (2, 3, 7), (5,), (0, 4), (2, 0)], ids=str)
def test_pytorch_s_own_checks_of_an_operator_pass(shape: tuple[int, ...], marked: bool) -> None:
    torch.library.opcheck(top_k._choose, (rows("whole", *shape), min(2, shape[-1]), marked))


def test_a_compiled_call_is_one_graph_and_gives_the_same_positions() -> None:
    scores = rows("causal", 2, 8, 8)

    def masked(scores: Any) -> Any:
        return top_k.choose(scores, min(3, scores.size(-1)), mark_infinite=True) + 1

    compiled = torch.compile(masked, backend="eager", fullgraph=True)

    assert torch.equal(compiled(scores), masked(scores))


def test_scores_that_want_a_gradient_are_taken_and_positions_have_none() -> None:
    scores = rows("normal", 3, 7).requires_grad_()

    found = top_k.choose(scores, 2)

    assert not found.requires_grad
    scores.gather(-1, found).sum().backward()
    assert scores.grad is not None
    assert scores.grad.sum() == 6


# Which way is taken.


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return the name of the module that computes, on a host that pretends to have a device."""
    pytest.importorskip("triton")
    top_k._of_device.cache_clear()
    monkeypatch.setattr(measured, "_said", set())
    monkeypatch.setattr(torch.version, "hip", None)

    def name(
        dtype: torch.dtype = torch.float32,
        keys: int = 4096,
        k: int = 1,
        device: torch.device = CUDA,
        found: str = "H200",
        triton: str = "3.6.0",
    ) -> str:
        capability = DEVICES[found].major, DEVICES[found].minor
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
        monkeypatch.setattr(measured, "_triton", lambda: triton)
        top_k._of_device.cache_clear()
        assert top_k.has_kernel(device) is (top_k.implementation(torch.float32, 1, 1, device) is not in_torch)
        return top_k.implementation(dtype, keys, k, device).__name__.rpartition(".")[2]

    yield name
    top_k._of_device.cache_clear()


def test_the_kernel_is_for_hopper(way: Callable[..., str]) -> None:
    for dtype in DTYPES:
        assert {way(dtype, keys, keys) for keys in (1, 4096, 32768)} == {"in_triton"}
        assert {way(dtype, keys, 16384) for keys in (32769, 1 << 20)} == {"in_triton"}


@pytest.mark.parametrize(
    "odd",
    [
        *({"found": name} for name in DEVICES if name != "H200"),
        {"triton": "3.7.0"},
        {"device": CPU},
        {"dtype": torch.float64},
        {"dtype": torch.int32},
        {"keys": 32769, "k": 16385},
    ],
    ids=str,
)
def test_all_else_is_sorted(way: Callable[..., str], odd: dict[str, Any]) -> None:
    assert way(**odd) == "in_torch"


# The kernel, in interpreters of its own.


CASES = [f"{keys}:{marked}" for keys in (1, 100, 4096, 8192, 16384, 32767, 32768, 131072) for marked in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_kernels_for_hopper_fit_it(programs: dict[str, Any], case: str) -> None:
    keys, marked = map(int, case.split(":"))
    launches = (
        1 if keys <= top_k.LONGEST else 3
    ) + marked  # stretches, their lists, and the rest; with bounds once more
    assert [each["kernel"] for each in programs[case]] == ["choose_rows"] * launches * len(DTYPES)
    assert max(each["shared"] for each in programs[case]) <= DEVICES["H200"].shared_memory_per_block_optin


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    """Return the resources of the kernel, for each case."""
    return compiled_programs.needs("top_k_targets.py", *CASES)


@pytest.fixture(scope="module")
def facts(grid_size: str) -> dict[str, Any]:
    """Return the results of `top_k_facts.py`."""
    pytest.importorskip("triton")
    return kept_answers.answer("top_k_facts.py", grid_size, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def test_the_interpreter_takes_the_kernel(facts: dict[str, Any]) -> None:
    assert facts["way"].endswith("top_k.in_triton")


@pytest.mark.parametrize("aspect", ["kinds", "dtypes", "long_rows", "layouts", "nothing", "stretches", "bounds"])
def test_the_kernel_is_right_about(facts: dict[str, Any], aspect: str) -> None:
    assert facts[aspect]
    assert [name for name, is_right in facts[aspect].items() if not is_right] == []


def test_each_case_has_the_property_in_its_name() -> None:
    for kind in KINDS:
        scores = rows(kind, 4, 40)
        assert (scores.isnan().any(), (scores == -torch.inf).any()) == (
            kind == "NaNs",
            kind in {"causal", "nothing finite", "infinities"},
        )
        has_equals = any(len(set(row)) < len(row) for row in scores.nan_to_num(nan=9.0).tolist())
        assert has_equals is (kind not in {"normal", "sorted", "powers", "outliers", "largest"}), kind
    assert some_of(5) == [0, 1, 2, 4, 5]
