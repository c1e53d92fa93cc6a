"""Tools of witnesses: reproducible numbers, and the names of operators with large results."""

from __future__ import annotations

import pytest
import torch

from megacpp_overlays.runtime.large_results import watch, wave


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4, 5), (0, 2)])
def test_numbers_are_always_the_same_and_none_of_them_alike(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    first = wave(*shape)
    torch.manual_seed(1)

    assert torch.equal(wave(*shape), first)
    assert (first.dtype, tuple(first.shape)) == (torch.float32, shape)
    assert first.unique().numel() == first.numel()
    assert bool((first.abs() <= 1).all())


def test_results_of_so_many_elements_are_named_and_smaller_ones_are_not() -> None:
    large: list[str] = []
    one, other = torch.ones(2, 5), torch.ones(5, 2)

    with watch(25, large):
        other @ one  # 25
        one @ other  # 4
        torch.cat([one, one]).add(1)  # 20

    assert large == ["mm"]


def test_one_of_several_results_is_enough() -> None:
    large: list[str] = []

    with watch(12, large):
        torch.ones(8).unsafe_split(4)  # 4 and 4
        torch.ones(8, 2).unsafe_split(6)  # 12 and 4

    assert large == ["ones", "unsafe_split"]


def test_results_and_options_of_a_watched_call_are_its_own() -> None:
    numbers = torch.tensor([3.0, 1.0, 2.0])

    with watch(1, []):
        values, places = numbers.sort(dim=-1, descending=True)

    assert values.tolist() == [3, 2, 1]
    assert places.tolist() == [0, 2, 1]
