"""Blocks of logits for the passes of `vocabulary_softmax`, and their results in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megacpp_overlays.kernels.masked_products.token_selection import select
from megacpp_overlays.kernels.vocabulary_softmax import in_torch as vocabulary_softmax_torch
from megacpp_overlays.kernels.vocabulary_softmax.numbers import Coefficients, Statistics


@dataclass(frozen=True, kw_only=True)
class Case:
    """A vocabulary that is cut into blocks, one after the other in the memory of one block."""

    tokens: int = 5
    widths: tuple[int, ...] = (300,)
    """Classes of each block."""
    padding: int = 0
    """Elements between two rows."""
    logits: str = "float32"
    out: str = "float32"
    in_place: bool = True
    bias: bool = False
    class_weight: bool = False
    softcap: float | None = None
    spread: bool = False
    selected: tuple[int, ...] | None = None
    """Tokens whose rows a block has, one after the other; after them it holds anything."""
    labels: str = "int64"
    first_class: int = 0

    @property
    def classes(self) -> int:
        return sum(self.widths)


HALVES = ("bfloat16", "float16")
CASES = {
    **{f"{width} classes": Case(widths=(width,)) for width in (1, 2, 3, 63, 64, 65, 1000, 2047, 2049, 5000)},
    **{
        f"options {bias:d}{class_weight:d}{spread:d}{softcap:d}": Case(
            widths=(130, 70),
            bias=bias,
            class_weight=class_weight,
            spread=spread,
            softcap=1.5 if softcap else None,
            first_class=1000,
        )
        for bias in (False, True)
        for class_weight in (False, True)
        for spread in (False, True)
        for softcap in (False, True)
    },
    **{f"{dtype} in place": Case(logits=dtype, out=dtype, widths=(301, 12), bias=True) for dtype in HALVES},
    **{f"{dtype}, apart": Case(logits=dtype, out=dtype, in_place=False) for dtype in HALVES},
    **{f"narrowed to {dtype}": Case(out=dtype, widths=(301, 12), bias=True) for dtype in HALVES},
    "narrowed apart": Case(out="bfloat16", in_place=False),
    "narrowed, a row of several blocks of a program": Case(
        tokens=3, widths=(20001,), padding=63, out="bfloat16", spread=True, class_weight=True
    ),
    "narrowed, a wide row and the rest of it": Case(tokens=2, widths=(33000, 8193), out="float16", softcap=2.0),
    "a row wider than a program": Case(tokens=2, widths=(40001,), logits="bfloat16", out="bfloat16"),
    "rows apart": Case(padding=17, widths=(300, 299), bias=True),
    "selected tokens": Case(selected=(0, 3, 4), bias=True, spread=True, class_weight=True, softcap=2.0),
    "selected tokens, narrowed": Case(selected=(1, 4), widths=(300, 299), out="bfloat16"),
    "selected tokens, several blocks of a program": Case(
        tokens=9, selected=(0, 1, 5, 6, 7, 8), widths=(3000, 2100), logits="bfloat16", out="bfloat16"
    ),
    "every token selected": Case(selected=(0, 1, 2, 3, 4), spread=True),
    "no token selected": Case(selected=(), widths=(300, 299), spread=True),
    "one token": Case(tokens=1),
    "no token": Case(tokens=0, bias=True, spread=True),
    **{f"{dtype} labels": Case(labels=dtype, widths=(70, 50)) for dtype in ("int32", "int16", "uint8")},
    "every class a block": Case(widths=(1,) * 6, spread=True, softcap=2.0, bias=True),
}
FEW = (
    "65 classes",
    "2049 classes",
    "options 1111",
    "bfloat16 in place",
    "narrowed to float16",
    "rows apart",
    "selected tokens",
    "selected tokens, narrowed",
    "no token",
    "every class a block",
)
"""A case for each path."""
EXTRAS = ("dead rows", "switched off classes")
"""Named besides; see `spoil`."""
TOKENS = (0, 1, 511, 512, 513, 1100)
"""Of the passes that have one number a token."""


@dataclass
class Block:
    """Inputs of a case."""

    logits: torch.Tensor
    """(tokens, all classes); a case hands them out block by block."""
    labels: torch.Tensor
    bias: torch.Tensor | None
    class_weight: torch.Tensor | None
    of_probability: torch.Tensor
    of_label: torch.Tensor
    of_spread: torch.Tensor | None


def draw(case: Case, seed: int = 1) -> Block:
    """Return random inputs; one label lies outside of all blocks, and one token has coefficients of 0."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    labels = torch.randint(0, case.classes, (case.tokens,), generator=generator) + case.first_class
    labels[3:4] = 120 if case.labels != "int64" else -100
    factors = [values(case.tokens) for _ in range(3)]
    for each in factors:
        each[2:3] = 0.0
        if case.selected is not None:
            each[[token for token in range(case.tokens) if token not in case.selected]] = 0.0
    return Block(
        logits=(3 * values(case.tokens, case.classes)).to(getattr(torch, case.logits)),
        labels=labels.to(getattr(torch, case.labels)),
        bias=values(case.classes) if case.bias else None,
        class_weight=values(case.classes).abs() if case.class_weight else None,
        of_probability=factors[0],
        of_label=factors[1],
        of_spread=factors[2] if case.spread else None,
    )


def run(case: Case, block: Block, passes: Any) -> dict[str, torch.Tensor]:
    """Return the statistics and the gradient that these passes find."""
    wide = torch.float64 if block.logits.dtype == torch.float64 else torch.float32
    tokens = block.logits.shape[0]
    running = Statistics(*torch.full((4 if case.spread else 3, tokens), math.nan, dtype=wide).unbind())
    memory = torch.full((tokens, max(case.widths) + case.padding), math.nan, dtype=block.logits.dtype)
    wanted = torch.ones(tokens, dtype=torch.bool)
    if case.selected is not None:
        wanted = torch.isin(torch.arange(tokens), torch.tensor(case.selected, dtype=torch.int64))
    selection = None if case.selected is None else select(wanted)
    rows = wanted.nonzero().squeeze(1)
    starts = [sum(case.widths[:index]) for index in range(len(case.widths))]
    parts = [slice(start, start + width) for start, width in zip(starts, case.widths, strict=True)]

    def of_classes(part: slice) -> tuple[Any, Any, float | None]:
        bias, weight = (None if each is None else each[part] for each in (block.bias, block.class_weight))
        return bias, weight, case.softcap

    for part in parts:
        logits = memory[:, : part.stop - part.start]
        logits[: len(rows)] = block.logits[rows, part]
        first = part.start + case.first_class
        passes.add_statistics(logits, block.labels, first, running, part.start == 0, *of_classes(part), selection)
    coefficients = Coefficients(running.lse, block.of_probability, block.of_label, block.of_spread)
    gradients, after = [], []
    dtype = wide if wide == torch.float64 else getattr(torch, case.out)
    for part in parts:
        width = part.stop - part.start
        logits = memory[:, :width]
        logits[: len(rows)] = block.logits[rows, part]
        out = memory.view(dtype)[:, :width] if case.in_place else torch.empty((tokens, width + 3), dtype=dtype)[:, 3:]
        first = part.start + case.first_class
        passes.logits_gradient(logits, block.labels, first, coefficients, *of_classes(part), out, selection)
        gradients.append(torch.zeros_like(out).index_copy_(0, rows, out[: len(rows)]))
        after.append(out[len(rows) :].clone())
    named = {name: each for name, each in running._asdict().items() if each is not None}
    whole = {"gradient": torch.cat(gradients, dim=1), "rows after": torch.cat(after, dim=1)}
    return {**named, "lse": running.lse, **whole}


def truth(case: Case, block: Block) -> dict[str, torch.Tensor]:
    """Return the results of the passes in PyTorch in float64."""
    wide = {name: each.double() for name, each in vars(block).items() if each is not None and name != "labels"}
    return run(case, Block(**{**vars(block), **wide}), vocabulary_softmax_torch)


def spoil(name: str) -> tuple[Case, Block]:
    """Return a case whose logits are not all finite."""
    if name == "dead rows":
        case = Case(widths=(70, 50), spread=True, softcap=None)
        block = draw(case)
        block.logits[2] = torch.tensor([float("nan"), float("inf"), float("-inf")] * 40)
        return case, block
    case = Case(widths=(70, 50, 30), bias=True)
    block = draw(case)
    block.labels = block.labels.clamp(max=69)
    assert block.bias is not None
    block.bias[70:] = float("-inf")
    return case, block
