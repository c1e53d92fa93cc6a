"""Calls of a linear cross entropy whose classes are spread over the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EVERY = {
    "bias": True,
    "class_weight": True,
    "label_smoothing": 0.1,
    "softcap": 3.0,
    "lse_square_scale": 0.01,
    "ignore_index": 7,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """12 tokens and 24 classes, which 2 and 3 divide."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of `linear_cross_entropy_cases.draw`."""
    dtype: str = "float64"
    batch: int = 0
    """(sequence, batch, hidden) hidden states where it is not 0."""
    sequence_parallel: bool = False
    keep: bool = False
    skip: bool = False
    """Tokens without a gradient are left out; every third one has none where a loss is kept for each."""
    labelled: int | None = None
    """So many tokens alone have a label; None ignores those that the draw ignores."""
    main_grad: bool = False
    frozen: tuple[str, ...] = ()
    first_shard_only: bool = False
    """All labels are classes of rank 0, and the last rank's classes are switched off by their bias."""


REDUCTIONS = ("none", "sum", "mean")
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "keep": {"keep": True},
    "sequence parallel": {"sequence_parallel": True},
    "sequence parallel, keep": {"sequence_parallel": True, "keep": True},
    "sequence parallel, batch": {"sequence_parallel": True, "batch": 2},
    "skip": {"skip": True},
    "sequence parallel, keep, skip": {"sequence_parallel": True, "keep": True, "skip": True},
}
CASES = {
    **{
        f"{name}, {reduction}, {way}": Case(options={**options, "reduction": reduction}, **more)
        for name, options in {"plain": {}, "every option": EVERY}.items()
        for reduction in REDUCTIONS
        for way, more in WAYS.items()
    },
    **{
        f"{name} alone": Case(options={name: EVERY[name]})
        for name in ("bias", "class_weight", "label_smoothing", "softcap", "lse_square_scale")
    },
    "smoothing and class weights, mean": Case(
        options={"class_weight": True, "label_smoothing": 0.3, "reduction": "mean"}
    ),
    "batch": Case(batch=3),
    "main_grad": Case(dtype="float32", main_grad=True),
    "main_grad, skip": Case(dtype="float32", main_grad=True, skip=True),
    "main_grad, sequence parallel, keep": Case(dtype="float32", main_grad=True, sequence_parallel=True, keep=True),
    "frozen weight": Case(frozen=("weight",), sequence_parallel=True),
    "frozen hidden states": Case(frozen=("hidden",), sequence_parallel=True),
    "one shard has all labels, one no class": Case(options={"bias": True}, first_shard_only=True),
    **{
        f"{count} labelled{way}": Case(options=EVERY, skip=True, labelled=count, **more)
        for count in (0, 1, 5, 12)
        for way, more in {"": {}, ", sequence parallel, keep": {"sequence_parallel": True, "keep": True}}.items()
    },
    "float32": Case(dtype="float32", options=EVERY),
    "bfloat16": Case(dtype="bfloat16", options={"bias": True}),
    "bfloat16, skip": Case(dtype="bfloat16", skip=True),
    "bfloat16, sequence parallel": Case(dtype="bfloat16", sequence_parallel=True),
}
LIMITS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2e-2}
