"""A tensor that is computed when it is first read."""

from __future__ import annotations

import gc
import weakref

import torch

from megacpp_overlays.kernels.top_k.deferred_scores import DeferredScores


class CountedNumbers:
    """Numbers, and how often they were asked for."""

    def __init__(self) -> None:
        self.numbers, self.calls = torch.arange(24.0).view(2, 3, 4), 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self.numbers.clone()


def test_shape_dtype_and_device_are_known_before_anything_is_computed() -> None:
    compute = CountedNumbers()

    made = DeferredScores((2, 3, 4), torch.device("cpu"), compute)

    assert (made.shape, made.dtype, made.device, made.size(-1)) == ((2, 3, 4), torch.float32, torch.device("cpu"), 4)
    assert repr(made) == "DeferredScores((2, 3, 4), device=cpu)"
    assert compute.calls == 0


def test_operations_are_those_of_the_numbers_which_are_computed_once() -> None:
    compute = CountedNumbers()
    made = DeferredScores((2, 3, 4), torch.device("cpu"), compute)

    assert torch.equal(made + 1, compute.numbers + 1)
    assert torch.equal(made.softmax(-1), compute.numbers.softmax(-1))
    assert torch.equal(torch.topk(made, 2).indices, torch.topk(compute.numbers, 2).indices)
    assert type(made[0]) is torch.Tensor
    assert compute.calls == 1


def test_written_scores_are_read_again() -> None:
    compute = CountedNumbers()
    made = DeferredScores((2, 3, 4), torch.device("cpu"), compute)

    made.masked_fill_(compute.numbers > 3, float("-inf"))

    assert made.isinf().sum() == 20


def test_nothing_is_kept_once_it_was_thrown_away_or_read() -> None:
    for reads in (False, True):
        compute = CountedNumbers()
        seen = weakref.ref(compute)
        made = DeferredScores((2, 3, 4), torch.device("cpu"), compute)
        del compute
        if reads:
            assert made.sum() == 276
        else:
            del made
        gc.collect()
        assert seen() is None
