"""Detection of fp32 weights that were cut in the wrong place, over blocks of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as some

from megacpp_overlays.runtime import displaced_masters
from megacpp_overlays.runtime.displaced_masters import Marks, TensorValues, marks

HALVES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True, params=[64, 1 << 22], ids=["small blocks", "one block"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displaced_masters, "BLOCK", request.param)


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def cut(gathered: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return upstream's slice of a gathered buffer, padded with zeros where the buffer ends."""
    found = gathered[start : start + count]
    return torch.nn.functional.pad(found, (0, count - len(found)))


def compared(master: torch.Tensor, weight: torch.Tensor, *moments: torch.Tensor) -> Marks:
    return marks(TensorValues(master), TensorValues(weight), [TensorValues(each) for each in moments])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masters_of_a_weight_have_no_mark(dtype: torch.dtype) -> None:
    master = numbers(500)
    master[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e30])

    assert compared(master, master.to(dtype), numbers(500, 1)) == Marks(differs=False)


@pytest.mark.parametrize("dtype", HALVES[:2], ids=str)
def test_ties_may_be_rounded_either_way(dtype: torch.dtype) -> None:
    weight = numbers(500).to(dtype)
    above = torch.nextafter(weight, torch.full_like(weight, float("inf")))
    between = (weight.float() + above.float()) / 2

    assert not compared(between, weight).differs
    assert not compared(between, above).differs
    assert compared(above.float() * 1.02, weight).differs


@given(
    ahead=some.integers(1, 200),
    count=some.integers(80, 600),
    behind=some.integers(0, 300),
    dtype=some.sampled_from(HALVES),
)
def test_masters_from_further_on_say_how_far(ahead: int, count: int, behind: int, dtype: torch.dtype) -> None:
    gathered, moments = numbers(count + behind), numbers(count + behind, 1)

    seen = compared(cut(gathered, ahead, count), gathered[:count].to(dtype), cut(moments, ahead, count))

    assert seen.differs
    enough = count - ahead > 64
    assert seen.displaced_by in ({ahead} if enough else {0, ahead})
    assert seen.zero_tail == min(max(ahead - behind, 0), count)


@given(
    ahead=some.integers(8, 60),
    shard=some.integers(200, 400),
    shards=some.integers(2, 4),
    new=some.sampled_from([0, 128, 700]),
    last_of_its_buffer=some.booleans(),
    dtype=some.sampled_from(HALVES),
)
@example(ahead=8, shard=327, shards=2, new=128, last_of_its_buffer=False, dtype=torch.bfloat16).via(
    "the first element behind a shard is like the weight by chance"
)
def test_shards_that_several_ranks_wrote_are_displaced_in_each(
    ahead: int, shard: int, shards: int, new: int, last_of_its_buffer: bool, dtype: torch.dtype
) -> None:
    """Read by one rank, perhaps into a parameter that grew by rows with values of their own."""
    buffers = [numbers(shard + (0 if last_of_its_buffer else ahead), seed) for seed in range(shards)]
    grown = [torch.zeros(new)]
    master = torch.cat([*(cut(each, ahead, shard) for each in buffers), *grown])
    weight = torch.cat([*(each[:shard] for each in buffers), numbers(new, 99)]).to(dtype)

    assert compared(master, weight, master).displaced_by == ahead


@given(new=some.integers(1, 800), count=some.integers(30, 400), dtype=some.sampled_from(HALVES))
def test_a_parameter_that_grew_has_no_mark(new: int, count: int, dtype: torch.dtype) -> None:
    """Its new rows have zeros for masters and moments, and values of their own in the model."""
    master = torch.nn.functional.pad(numbers(count), (0, new))
    weight = torch.cat([numbers(count), numbers(new, 1)]).to(dtype)

    assert compared(master, weight, master) == Marks(differs=True)


def test_equal_rows_of_which_the_first_is_another_now_are_no_displacement() -> None:
    """As tokens that no text has, where the first of them was given values after the checkpoint was written."""
    row = numbers(40)
    master = torch.cat([row.repeat(28), numbers(3000, 1)])
    weight = torch.cat([numbers(40, 2), master[40:]]).bfloat16()

    assert compared(master, weight, numbers(4120, 3)) == Marks(differs=True)


def test_nothing_but_zeros_is_a_mark_where_the_weight_is_something() -> None:
    zeros = torch.zeros(40)

    assert compared(zeros, numbers(40), zeros, zeros) == Marks(True, 0, 40)


@pytest.mark.parametrize("moment", [0, 1])
def test_zeros_are_no_mark_where_a_moment_has_something(moment: int) -> None:
    """Such masters differ, and not because a buffer has ended."""
    moments = [torch.zeros(400), torch.zeros(400)]
    moments[moment][-1] = 1.0
    master = numbers(400)
    master[-20:] = 0

    assert compared(master, numbers(400), *moments).zero_tail == 0


def test_zeros_are_no_mark_where_the_weight_has_them_too() -> None:
    """Rows that pad a vocabulary."""
    master, weight = numbers(400), numbers(400, 1)
    master[-20:] = weight[-20:] = 0

    assert compared(master, weight, torch.zeros(400)) == Marks(differs=True)


@pytest.mark.parametrize(
    "master",
    [
        numbers(500, 7),
        numbers(500) * 1.05,
        torch.cat([numbers(500)[:100], numbers(500)[150:], numbers(50, 3)]),
        torch.cat([numbers(500)[50:300], numbers(250, 3)]),
        torch.cat([numbers(500)[50:460], numbers(90, 3)]),
        torch.cat([numbers(20, 3), numbers(500)[:480]]),
        torch.ones(500),
    ],
    ids=[
        "another model",
        "rounded elsewhere",
        "right at first",
        "own only for a while",
        "own for long",
        "from before",
        "all alike",
    ],
)
def test_masters_that_differ_in_another_way_have_no_mark(master: torch.Tensor) -> None:
    assert compared(master, numbers(500).bfloat16(), numbers(500, 1)) == Marks(differs=True)


def test_a_displacement_is_seen_behind_numbers_that_are_all_alike() -> None:
    gathered = torch.cat([torch.ones(300), numbers(700)])

    assert compared(cut(gathered, 37, 900), gathered[:900].bfloat16(), numbers(900, 1)).displaced_by == 37


def test_all_alike_is_never_displaced() -> None:
    """A norm that was never trained is like itself, wherever it is cut."""
    assert compared(torch.ones(500), torch.ones(500).bfloat16()) == Marks(differs=False)
    assert compared(torch.ones(500), torch.full((500,), 2.0).bfloat16(), torch.ones(500)) == Marks(differs=True)
