"""The fused linear cross entropy as Megatron calls it, run on the CPU: it detects code that divides twice or not at all.

On our stand-in for Megatron-LM dev, and on edits of it and of the entry that keep every name and every shape.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from trees import STAND_INS

from megacpp_overlays.kernels.linear_cross_entropy import entry
from megacpp_overlays.kernels.linear_cross_entropy.rehearsal import Rehearsal, wrong

TEXT = (STAND_INS["dev-linear-cross-entropy"] / "megatron/core/fusions/fused_linear_cross_entropy.py").read_text()


def upstream(*edits: tuple[str, str]) -> ModuleType:
    """Return the stand-in with edits, loaded under no name."""
    text = TEXT
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    module = ModuleType("upstream")
    exec(compile(text, "upstream", "exec"), vars(module))
    return module


def rehearsed(module: ModuleType, **entries: Callable[..., Any]) -> list[str]:
    return list(wrong(Rehearsal(module.linear_cross_entropy, "_get_platform", "LinearCrossEntropy", **entries)))


def test_the_portable_entry_below_upstream_s_functions_is_right() -> None:
    assert rehearsed(upstream()) == []
    assert not torch.cuda.is_initialized()


def test_nothing_of_the_module_is_changed() -> None:
    module = upstream()
    before = dict(vars(module))

    rehearsed(module)

    assert vars(module) == before


@pytest.mark.parametrize(
    ("edits", "seen"),
    [
        ((("        return loss\n", "        return loss / kept\n"),), 'with reduction "mean" the loss'),
        ((("        return loss\n", "        return loss + total.log().sum()\n"),), 'with reduction "sum" the loss'),
        (
            (("                dlogprobs,\n", "                dlogprobs / num_valid_tokens,\n"),),
            'with reduction "sum" the gradient of the weight',
        ),
        (
            (("return for_hidden, for_weight,", "return 2 * for_hidden, for_weight,"),),
            'with reduction "none" the gradient of the hidden states',
        ),
        (
            (
                (
                    "LinearCrossEntropy.apply(hidden, weight, labels, tp_group, reduction,",
                    "LinearCrossEntropy.apply(hidden, weight, labels, tp_group, 'sum' if reduction == 'mean' else reduction,",
                ),
            ),
            'with reduction "mean" the loss',
        ),
        (
            (("reduction, ignore_index, sequence_parallel)\n", "reduction, -100, sequence_parallel)\n"),),
            'with reduction "none" the loss',
        ),
        (
            (("return LinearCrossEntropy.apply(hidden,", "return LinearCrossEntropy.apply(2 * hidden,"),),
            'with reduction "none" the loss',
        ),
    ],
)
def test_changes_by_upstream_around_the_entry_are_seen(edits: tuple[tuple[str, str], ...], seen: str) -> None:
    assert f"{seen} is not that of the logits" in rehearsed(upstream(*edits))


def divided_twice(*given: Any) -> Any:
    loss, *rest = entry.forward_on_any_device(*given)
    return loss / rest[2], *rest


def sums(hidden: Any, weight: Any, labels: Any, group: Any, reduction: Any, *more: Any) -> Any:
    """Return the results of an entry without a mean, whose caller has to divide."""
    return entry.forward_on_any_device(hidden, weight, labels, group, "none" if reduction == "none" else "sum", *more)


def of_a_sum(*given: Any) -> Any:
    *before, reduction, ignore_index, group, rank, ranks, sequence_parallel = given
    reduction = "none" if reduction == "none" else "sum"
    return entry.backward_on_any_device(*before, reduction, ignore_index, group, rank, ranks, sequence_parallel)


def with_every_token(hidden: Any, weight: Any, labels: Any, group: Any, reduction: Any, _: Any, parallel: Any) -> Any:
    return entry.forward_on_any_device(hidden, weight, labels.clamp(min=0), group, reduction, -100, parallel)


@pytest.mark.parametrize(
    ("entries", "seen"),
    [
        ({"forward": divided_twice}, 'with reduction "mean" the loss'),
        ({"forward": sums}, 'with reduction "mean" the loss'),
        ({"backward": of_a_sum}, 'with reduction "mean" the gradient of the weight'),
        ({"forward": with_every_token}, 'with reduction "sum" the loss'),
        (
            {"backward": lambda *given: entry.backward_on_any_device(*given)[::-1]},
            'with reduction "none" the gradient of the weight',
        ),
    ],
)
def test_an_entry_of_the_same_contract_and_other_numbers_is_seen(
    entries: dict[str, Callable[..., Any]], seen: str
) -> None:
    """Each takes the arguments of an entry, and returns values of the same shapes."""
    assert f"{seen} is not that of the logits" in rehearsed(upstream(), **entries)
