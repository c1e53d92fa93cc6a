"""Claims about the Trainer of transformers with Liger's loss of each token, and their judgement."""

from __future__ import annotations

import math
from collections.abc import Callable

from claims import Claim, Found, Verdict
from trainer_launches import OVERLAY, Data, Launch, Way
from trainer_sizes import BITS, NEAR

WRONG = 0.1
"""Relative: a larger difference is not rounding."""


def run(found: Found, data: Data, way: Way) -> Found:
    """Return the measurements of one run."""
    kept: Found = found["runs"][Launch(data, way).name]
    return kept


def worst(found: Found, data: Data, way: Way, series: str, *, true: Way = Way.TORCH) -> float:
    """Return the largest relative difference from PyTorch, or another way, over all steps, of `losses` or of `norms`."""
    pairs = zip(run(found, data, way)[series], run(found, data, true)[series], strict=True)
    errors = [0.0 if ours == wanted else _off(ours, wanted) for ours, wanted in pairs]
    return max(math.inf if math.isnan(error) else error for error in errors)


def _off(ours: float, wanted: float) -> float:
    return abs(ours - wanted) / abs(wanted) if wanted else math.inf


def _ends(kept: Found) -> str:
    return f"{kept['losses'][0]:.2f} to {kept['losses'][-1]:.2f}"


def learns_nothing(found: Found) -> Verdict:
    """Judge that stock gradients are zero where the first token does not count, and that PyTorch's are not."""
    stock, true = (run(found, Data.PROMPTS, way) for way in (Way.STOCK, Way.TORCH))
    zero = sum(norm == 0 for norm in stock["norms"])
    steps = len(stock["norms"])
    figure = f"grad_norm is 0 in {zero} of {steps} steps; loss {_ends(stock)}, with PyTorch {_ends(true)}"
    return Verdict.of(figure, holds=zero == steps and min(true["norms"]) > 0 and true["losses"][-1] < true["losses"][0])


def learns_something_else(found: Found) -> Verdict:
    """Judge that stock gradients are wrong where every token counts: the loss of the first step is right, its gradient not."""
    stock, true = (run(found, Data.WEIGHTS, way) for way in (Way.STOCK, Way.TORCH))
    first = abs(stock["losses"][0] - true["losses"][0]) / true["losses"][0]
    off = worst(found, Data.WEIGHTS, Way.STOCK, "norms")
    norms = f"grad_norm of step 1 is {stock['norms'][0]:.3f}, with PyTorch {true['norms'][0]:.3f}"
    figure = f"{norms}, from losses that differ by {first:.1e}; worst of all steps {off:.0%}"
    return Verdict.of(figure, holds=first < NEAR[found["host"]].losses and off > WRONG)


def equals_torch(data: Data, way: Way) -> Claim:
    """Return the claim that a way trains as PyTorch does."""

    def judge(found: Found) -> Verdict:
        losses, norms = (worst(found, data, way, series) for series in ("losses", "norms"))
        same = sum(
            ours == true
            for ours, true in zip(run(found, data, way)["losses"], run(found, data, Way.TORCH)["losses"], strict=True)
        )
        figure = f"worst relative difference: loss {losses:.1e}, grad_norm {norms:.1e}; "
        figure += f"{same} of {found['steps']} losses have the same bits; loss {_ends(run(found, data, way))}"
        near = NEAR[found["host"]]
        return Verdict.of(figure, holds=losses < near.losses and norms < near.norms)

    words = {Data.PROMPTS: "the first tokens do not count", Data.WEIGHTS: "every token counts, some more"}
    where = "by `megacpp_overlays run`" if way is Way.OVERLAY else "by `megacpp_overlays run` on Liger 0.8.5"
    return Claim(
        f"trainer-{data.value}-{way.name.lower()}",
        f"where {words[data]}, the same launcher, started {where}, trains as with PyTorch's loss",
        judge,
    )


def decided(found: Found) -> Verdict:
    """Judge the decisions: active on the broken release, retired on the repaired one, nothing where it was switched off."""
    expected = {
        (Data.PROMPTS, Way.OVERLAY): "active",
        (Data.WEIGHTS, Way.OVERLAY): "active",
        (Data.WEIGHTS, Way.OFF): "disabled",
        (Data.PROMPTS, Way.NEWER): "retired",
    }
    seen = {key: run(found, *key) for key in expected}
    figure = ", ".join(
        dict.fromkeys(
            f"{kept['decision']} on {kept['version']}" + (" when switched off" * (key[1] is Way.OFF))
            for key, kept in seen.items()
        )
    )
    return Verdict.of(figure, holds={key: kept["decision"] for key, kept in seen.items()} == expected)


def used(found: Found) -> Verdict:
    """Judge that the active overlay was reached in every step: an overlay that is never called proves nothing."""
    steps, kept = found["steps"], run(found, Data.PROMPTS, Way.OVERLAY)
    others = [run(found, data, way)["calls"] for data, way in ((Data.WEIGHTS, Way.OFF), (Data.PROMPTS, Way.NEWER))]
    figure = f"its seams were called {kept['calls']} times in {steps} steps, forward and backward; {sum(others)} times where it is off or retired"
    return Verdict.of(figure, holds=kept["calls"] >= 2 * steps and not any(others))


def repeated(data: Data, way: Way, other: Way) -> Callable[[Found], Verdict]:
    """Return the judge of a claim that two ways compute the same: with the same bits where a host repeats them."""

    def judge(found: Found) -> Verdict:
        these, those = (run(found, data, each) for each in (way, other))
        pairs = [pair for series in ("losses", "norms") for pair in zip(these[series], those[series], strict=True)]
        same = sum(this == that for this, that in pairs)
        figure = f"{same} of {len(pairs)} losses and grad_norms have the same bits"
        near = NEAR[found["host"]].repeated
        if near == BITS:
            return Verdict.of(figure, holds=same == len(pairs))
        losses, norms = (worst(found, data, way, series, true=other) for series in ("losses", "norms"))
        figure += f"; worst relative difference: loss {losses:.1e}, grad_norm {norms:.1e}"
        return Verdict.of(figure, holds=max(losses, norms) <= near)

    return judge


CLAIMS = (
    Claim(
        "trainer-prompts-stock",
        "where the first tokens do not count, a Trainer with stock Liger 0.8.1 learns nothing",
        learns_nothing,
    ),
    equals_torch(Data.PROMPTS, Way.OVERLAY),
    Claim(
        "trainer-prompts-import",
        "one import in front of that launcher does what `megacpp_overlays run` does",
        repeated(Data.PROMPTS, Way.IMPORT, Way.OVERLAY),
    ),
    Claim(
        "trainer-weights-stock",
        "where every token counts, some more, stock Liger 0.8.1 trains with wrong gradients",
        learns_something_else,
    ),
    equals_torch(Data.WEIGHTS, Way.OVERLAY),
    Claim("trainer-decisions", f"`{OVERLAY}` is active on 0.8.1 and retired on 0.8.5", decided),
    Claim("trainer-used", f"`{OVERLAY}` is used, and not only active", used),
    equals_torch(Data.PROMPTS, Way.NEWER),
    Claim(
        "trainer-weights-off",
        "switched off by its variable, it leaves what stock does",
        repeated(Data.WEIGHTS, Way.OFF, Way.STOCK),
    ),
)
