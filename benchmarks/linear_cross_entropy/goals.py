"""Compare the results of linear_cross_entropy.py with the goals of the fused linear cross entropy. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator

from report import Found

OURS, KEPT, UNMASKED = "ours", "ours, logits kept", "ours, none without a mask"
COMPUTED, KEPT_COMPUTED = f"{OURS}, masked tokens computed", f"{KEPT}, masked tokens computed"
SKIPPED, KEPT_SKIPPED = f"{OURS}, told to skip", f"{KEPT}, told to skip"
APART = f"{SKIPPED}, one block of classes at a time"
SETTINGS = frozenset((COMPUTED, KEPT_COMPUTED, SKIPPED, KEPT_SKIPPED, APART))
"""Ours with another setting, which does not change its options."""
ENTRY = "ours, as Megatron calls it"
THREE, FOUR = "three products", "four products"
EAGER, COMPILED = "PyTorch", "torch.compile"
ROUNDED = "float64, rounded to bfloat16"
LIGER, EXACT = "liger-kernel 0.8.5", "cut-cross-entropy, exact"

LABELLED_ALONE = ", labelled tokens selected beforehand"
"""After the name of a way that gets nothing but labelled tokens; who selects them waits for the device."""

OF_FLOOR, EXTRA_MIB, OF_NONE, TIMES_AS_RIGHT = 1.08, 256, 1.03, 3
OF_LABELLED, OF_COMPUTED = 1.12, 1.03
OF_PRODUCTS = (
    (OURS, "none", FOUR),
    (ENTRY, "none, float32 logits as Megatron has them", FOUR),
    (COMPUTED, "none, masked tokens computed", FOUR),
    (KEPT_COMPUTED, "logits kept, masked tokens computed", THREE),
)
"""Ways that run, their description, and the products that they are compared with."""
TIMES_AS_FAST = {LIGER: 1.3, EXACT: 2.0}

Goal = tuple[str, str, str, str]


def goals(found: Found) -> Iterator[Goal]:
    """Yield the place, the goal, the measurement, and whether it is enough."""
    for each in found.get("none", ()):
        where, rows = size(each["shape"]), each["rows"]
        for name, description, floor in OF_PRODUCTS:
            if name in rows:
                yield from at_most(
                    f"{where}, {description}", f"<= {OF_FLOOR} x the {floor}", rows, name, floor, OF_FLOOR
                )
        for peer, times in TIMES_AS_FAST.items():
            yield from faster(f"{where}, none", rows, peer, times)
        yield from memory(f"{where}, none", rows[OURS])
        yield from at_most(f"{where}, logits kept", f"<= {OF_FLOOR} x the three products", rows, KEPT, THREE, OF_FLOOR)
        yield from at_most(f"{where}, logits kept", "not slower than torch.compile", rows, KEPT, COMPILED, 1.0)
        yield from no_more_memory(f"{where}, logits kept", rows)
    for each in found.get("mean", ()):
        where = f"{size(each['shape'])}, mean"
        yield from at_most(where, f"<= {OF_NONE} x none on the same data", each["rows"], OURS, UNMASKED, OF_NONE)
    for each in found.get("labelled", ()):
        yield from of_labelled(each)
    for each in found.get("accuracy", ()):
        for labels, rows in each["none"].items():
            yield from as_right(f"{size(each['shape'])}, {labels} labels", rows)


def of_labelled(each: Found) -> Iterator[Goal]:
    """Yield the rows on a batch some of whose tokens have a label: time compared with the products over those, and memory."""
    rows = each["rows"]
    where = f"{size(each['shape'])}, {each['labelled']} tokens labelled"
    for name, floor in ((OURS, FOUR), (SKIPPED, FOUR), (KEPT_SKIPPED, FOUR), (KEPT_SKIPPED, THREE)):
        if each["labelled"] < each["shape"]["tokens"]:
            asked = f"<= {OF_LABELLED} x the {floor} over them"
            yield from at_most(f"{where}, {name}", asked, rows, name, floor, OF_LABELLED)
    if each["labelled"] == each["shape"]["tokens"]:
        for name, other in (
            (OURS, COMPUTED), (KEPT, KEPT_COMPUTED), (SKIPPED, COMPUTED), (KEPT_SKIPPED, KEPT_COMPUTED),
        ):  # fmt: skip
            yield from at_most(f"{where}, {name}", f"<= {OF_COMPUTED} x {other}", rows, name, other, OF_COMPUTED)
    if SKIPPED in rows:
        yield from memory(f"{where}, {SKIPPED}", rows[SKIPPED])


def refuses(row: Found) -> bool:
    """Return whether a way says that it has no such reduction; other failures say nothing about it."""
    return "reduction" in row.get("failed", "")


def size(shape: Found) -> str:
    """Return sizes in words."""
    return f"{shape['tokens']} x {shape['hidden']} x {shape['vocabulary']}"


def share(each: Found) -> str:
    """Say how many tokens of a batch have a label."""
    return f"{each['labelled']} of {each['shape']['tokens']} tokens labelled"


def ratio(rows: Found, name: str, other: str, cache: str) -> float | None:
    """Return how long one takes, as a multiple of how long another does; None if one of them did not run."""
    one, two = (((rows.get(each) or {}).get(cache) or {}).get("ms") for each in (name, other))
    return one / two if one and two else None


def both(rows: Found, name: str, other: str) -> tuple[float, float] | None:
    """Return the ratio with a warm and with a cold cache."""
    warm, cold = (ratio(rows, name, other, cache) for cache in ("warm", "cold"))
    return None if warm is None or cold is None else (warm, cold)


def goal(where: str, asked: str, seen: str, reached: bool) -> Goal:
    """Return one row."""
    return where, asked, seen, "reached" if reached else "**missed**"


def at_most(where: str, asked: str, rows: Found, name: str, other: str, limit: float) -> Iterator[Goal]:
    """Yield the row that compares two times with a limit."""
    found = both(rows, name, other)
    if found is None:
        yield where, asked, f"{name} or {other} did not run", "not measured"
        return
    yield goal(where, asked, f"{found[0]:.3f} x, cold {found[1]:.3f} x", max(found) <= limit)


def faster(where: str, rows: Found, peer: str, times: float) -> Iterator[Goal]:
    """Yield the row that says how many times faster ours is than a peer."""
    asked, found = f">= {times} x faster than {peer}", both(rows, peer, OURS)
    if found is None:
        yield where, asked, f"{peer} did not run", "not measured"
        return
    yield goal(where, asked, f"{found[0]:.2f} x, cold {found[1]:.2f} x", min(found) >= times)


def memory(where: str, row: Found) -> Iterator[Goal]:
    """Yield the row on the extra peak."""
    if row.get("extra_mib") is not None:
        seen = f"{row['extra_mib']:.0f} MiB"
        yield goal(where, f"extra peak <= {EXTRA_MIB} MiB", seen, row["extra_mib"] <= EXTRA_MIB)


def no_more_memory(where: str, rows: Found) -> Iterator[Goal]:
    """Yield the row that compares the peak with that of torch.compile."""
    mine, theirs = (rows.get(name, {}).get("extra_mib") for name in (KEPT, COMPILED))
    if mine is not None and theirs is not None:
        seen = f"{mine:.0f} MiB, torch.compile {theirs:.0f} MiB"
        yield goal(where, "no more memory than torch.compile", seen, round(mine) <= round(theirs))


def as_right(where: str, rows: Found) -> Iterator[Goal]:
    """Yield the rows that compare gradients with those of float64, of PyTorch and of Liger, norm over norm."""
    ours, kept, plain, liger, exact = (rows.get(each, {}).get("errors") for each in (OURS, KEPT, EAGER, LIGER, ROUNDED))
    if not ours or not kept:
        return
    for gradient, words in (("x", "dX"), ("weight", "dW")):
        mine = [each[gradient]["norm"] for each in (ours, kept)]
        if plain:
            theirs = plain[gradient]["norm"]
            asked = f"error of {words} no worse than PyTorch's"
            seen = f"{mine[0]:.2e}, logits kept {mine[1]:.2e}, PyTorch {theirs:.2e}"
            yield goal(where, asked, seen, round(max(mine) / theirs, 2) <= 1)
    if not liger:
        return
    for part, measure, words in (
        ("weight from plain", "norm", "as near to PyTorch's as Liger's"),
        ("weight", "max", "as right as Liger's against float64, at the largest error"),
        ("weight", "norm", "as right as Liger's against float64"),
    ):
        if part in liger and part in ours:
            theirs, worst = liger[part][measure], max(each[part][measure] for each in (ours, kept))
            asked = f"dW {TIMES_AS_RIGHT} x {words}"
            times = theirs / worst if worst else math.inf
            seen = f"{times:.2f} x: {worst:.2e}, Liger {theirs:.2e}"
            best = exact[part][measure] if exact and part in exact else 0.0
            if theirs < TIMES_AS_RIGHT * best:
                yield where, asked, f"{seen}; float64, rounded to bfloat16, {best:.2e}", "out of reach of bfloat16"
            else:
                yield goal(where, asked, seen, times >= TIMES_AS_RIGHT)
