"""Cases of pack 10 for the portable entry: data only, for the tests and for `portable_entry_grid.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call and its backward pass. Sizes but `batch` are multiplied by the scale of the run; dtypes are names."""

    tokens: int = 8
    """For three-dimensional hidden states the sequence length; then there are `batch` times as many."""
    batch: int = 0
    """0 means two-dimensional hidden states."""
    hidden: int = 5
    classes: int = 13
    dtype: str = "float32"
    reduction: str = "none"
    ignore_index: int = -100
    ignored: tuple[int, ...] = (1,)
    """Which tokens; (-1,) means all."""
    outside: bool = False
    """Whether the labels of two tokens are in no vocabulary."""
    label_dtype: str = "int64"
    arrives: str = "random"
    """The gradient that arrives at the loss: `random`, `zero first`, `strided` or `expanded`."""
    shift: float = 0.0
    """Added to all logits through a constant hidden feature."""
    split: int = 0
    """Classes in a block; 0 leaves it to the entry."""
    autocast: str = ""
    frozen: tuple[str, ...] = ()
    sequence_parallel: bool = False


CASES = {
    "none": Case(),
    "sum": Case(reduction="sum"),
    "mean": Case(reduction="mean"),
    "blocks": Case(split=4),
    "blocks of one": Case(split=1, reduction="mean"),
    "block as wide as the vocabulary": Case(split=13),
    "three dimensions": Case(tokens=4, batch=3, split=5),
    "three dimensions, mean": Case(tokens=4, batch=3, reduction="mean"),
    "other ignore index": Case(ignore_index=4, ignored=(0, 5)),
    "nothing ignored": Case(ignored=(), reduction="mean"),
    "all ignored": Case(ignored=(-1,)),
    "all ignored, sum": Case(ignored=(-1,), reduction="sum"),
    "label outside the vocabulary": Case(outside=True, split=4),
    "int32 labels": Case(label_dtype="int32"),
    "strided gradient": Case(arrives="strided"),
    "expanded gradient": Case(arrives="expanded"),
    "zero first": Case(arrives="zero first"),
    "logits far below zero": Case(shift=-300.0, split=4),
    "logits far above zero": Case(shift=300.0, split=4),
    "one token": Case(tokens=1, ignored=(), reduction="mean"),
    "no token": Case(tokens=0, ignored=()),
    "one class": Case(classes=1, ignored=()),
    "one feature": Case(hidden=1),
    "wide vocabulary": Case(tokens=2, classes=5000, ignored=()),
    "frozen hidden": Case(frozen=("hidden",)),
    "frozen weight": Case(frozen=("weight",)),
    "autocast": Case(autocast="bfloat16"),
    "bfloat16": Case(dtype="bfloat16", hidden=16, split=4),
    "bfloat16, mean": Case(dtype="bfloat16", hidden=16, reduction="mean"),
    "bfloat16, sum": Case(dtype="bfloat16", hidden=16, reduction="sum", batch=2, tokens=4),
    "float16": Case(dtype="float16", hidden=16, split=4),
    "float16, mean": Case(dtype="float16", hidden=16, reduction="mean"),
}

LARGE = {
    "large": Case(tokens=2048, hidden=1024, classes=32001, dtype="bfloat16"),
    "large, mean": Case(tokens=1024, batch=2, hidden=1024, classes=32001, dtype="bfloat16", reduction="mean"),
    "large, float16": Case(tokens=2048, hidden=1024, classes=32001, dtype="float16"),
    "large, several blocks": Case(tokens=2048, hidden=520, classes=70000, dtype="bfloat16", reduction="sum"),
}
"""Cases for a GPU, at scale 1."""

PARALLEL = {
    "none": Case(split=4),
    "sum": Case(reduction="sum"),
    "mean": Case(reduction="mean", ignore_index=4, ignored=(0, 5)),
    "three dimensions": Case(tokens=4, batch=3, split=4),
    "label outside the vocabulary": Case(outside=True),
    "all ignored": Case(ignored=(-1,)),
    "logits far below zero": Case(shift=-300.0),
    "bfloat16": Case(dtype="bfloat16", hidden=16),
    "sequence parallel": Case(sequence_parallel=True, split=4),
    "sequence parallel, mean": Case(sequence_parallel=True, reduction="mean"),
    "sequence parallel, three dimensions": Case(sequence_parallel=True, tokens=4, batch=3),
    "sequence parallel, bfloat16": Case(sequence_parallel=True, dtype="bfloat16", hidden=16, reduction="sum"),
}
"""Cases for two ranks. `tokens` counts those of all ranks, `classes` those of one rank."""
