"""Proof of models with every type of layer of Megatron's hybrid models, trained by its own launcher, stock and with overlays.

Some layers need packages and kernels that a host may lack. A launch that ends for such a reason is a result, and its error is kept.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace

from claims import Claim, Found, Outcome, Say, Verdict, Workplace
from megatron_claims import NOISE
from megatron_launcher import Site, ended, prepared, tried
from megatron_layers_sizes import INTERPRETED, KERNELS, LATENT, MODELS, SOFTMAX, Model, packages, sized
from megatron_series import ROUNDING, apart
from upstream_tests import LAUNCHERS

STOCK, OURS, ROUNDED = "stock", "overlays", "stock, rounded otherwise"
TAKES = "8 launches of 8 steps on one GPU, 6 of 6 elsewhere"
CALLED = (
    *("dsa-sparse-attention", "dsa-indexer-streaming", "mla-rope-key-gradient", "mamba2-int32-offsets"),
    *("masked-aux-loss-tokens", "expert-bias-padding-mask", "gathered-logits-loss"),
)
"""Overlays that the latent model has to call, at least as many times as it has steps."""
INPUTS = (LAUNCHERS / "every_layer_stack.py", INTERPRETED / "sitecustomize.py")


def measure(place: Workplace, say: Say) -> Found:
    """Launch each model stock and with overlays; return losses, decisions and calls of each launch, or its error.

    Where a package is missing, only the first model is launched, so that the error is reported once.

    Raises:
        ProofError: no checkout was given, it is none, or a launch succeeded and logged no step.
    """
    site = prepared(place)
    found = {**site.about(), "packages": packages(), "models": {}}
    found["inputs"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in INPUTS}
    for model in MODELS if not missing(found) else MODELS[:1]:
        resized = replace(site, sizes=sized(model, site.sizes))
        found["models"][model.id] = {**_about(model, resized), "runs": _launched(model, resized, say)}
    return found


def _about(model: Model, site: Site) -> Found:
    return {
        "pattern": model.pattern,
        "spec": model.rule.value,
        "steps": site.sizes.steps,
        "arguments": list(site.sizes.arguments),
    }


def _launched(model: Model, site: Site, say: Say) -> Found:
    """Launch a model stock and with overlays, and once more stock with other rounding; return the result of each launch.

    The last launch is left out where the host has no switches for it, for KERNELS, and where stock ended with an error.
    """
    ways: dict[str, Mapping[str, str]] = {STOCK: {}, OURS: {}}
    ways |= {ROUNDED: site.sizes.rounds} if site.sizes.rounds and model is not KERNELS else {}
    runs: Found = {}
    for number, (way, switches) in enumerate(ways.items(), start=1):
        if way == ROUNDED and "error" in runs[STOCK]:
            continue
        began = time.monotonic()
        words = ["--train-iters", str(site.sizes.steps)]
        runs[way] = run = tried(site, f"{model.id} {way}", words, overlays=way == OURS, switches=switches)
        title = f"{model.pattern} {model.rule.value}, {way}"
        say(f"[{number}/{len(ways)}] Megatron: {title}: {ended(run)}, {time.monotonic() - began:.0f} s")
    return runs


def missing(found: Found) -> list[str]:
    """Return the names of the packages that are not installed."""
    return [name for name, version in found["packages"].items() if version is None]


def trains_as_stock(model: Model, says: str) -> Claim:
    """Return the claim that a model trains with overlays as it does without them.

    It holds if the loss falls, no step is skipped or NaN, and losses differ from stock's by no more than rounding. If both
    launches end with the same error, the outcome is UPSTREAM.

    Args:
        model: the model.
        says: the claim in words.
    """

    def judge(found: Found) -> Verdict:
        runs = found["models"][model.id]["runs"]
        stock, ours = runs[STOCK], runs[OURS]
        if "error" in ours or "error" in stock:
            return _of_an_end(stock, ours, missing(found))
        noise = apart(runs[ROUNDED]["losses"], stock["losses"]) if "losses" in runs.get(ROUNDED, {}) else 0.0
        losses, norms = (apart(ours[series], stock[series]) for series in ("losses", "norms"))
        lost = sum(ours["skipped"]) + sum(ours["nans"])
        first, last = ours["losses"][0], ours["losses"][-1]
        figure = (
            f"loss {first:.3f} to {last:.3f} in {len(ours['losses'])} steps, {lost:.0f} skipped or without a number; "
        )
        figure += f"worst relative difference from stock: loss {losses:.1e}, grad norm {norms:.1e}"
        if ROUNDED in runs:
            figure += (
                f"; stock rounded otherwise: {f'{noise:.1e}' if 'losses' in runs[ROUNDED] else ended(runs[ROUNDED])}"
            )
        return Verdict.of(figure, holds=not lost and last < first and losses <= max(ROUNDING, NOISE * noise))

    return Claim(f"megatron-layers-{model.id}", says, judge, asked=lambda found: model.id in found["models"])


def _of_an_end(stock: Found, ours: Found, absent: list[str]) -> Verdict:
    """Return the verdict where a launch, or both, ended with an error: UPSTREAM for the same error in both, otherwise FAILS."""
    same = ours.get("error") == stock.get("error")
    figure = f"not installed: {', '.join(absent)}; " if absent else ""
    figure += f"with overlays and without: {ended(ours)}" if same else f"{ended(ours)}; stock: {ended(stock)}"
    return Verdict(Outcome.UPSTREAM if same else Outcome.FAILS, figure)


def _trained(found: Found) -> bool:
    return "losses" in found["models"][LATENT.id]["runs"][OURS]


def used(found: Found) -> Verdict:
    """Judge that each overlay of `CALLED` has at least as many calls as there are steps, and that no overlay is in conflict."""
    run = found["models"][LATENT.id]["runs"][OURS]
    decisions, calls, steps = run["decisions"], run["calls"], len(run["losses"])
    active = sum(decision == "active" for decision in decisions.values())
    conflicts = sorted(name for name, decision in decisions.items() if decision == "conflict")
    reached = sorted((name for name in calls if calls[name]), key=lambda name: (-calls[name], name))
    named = ", ".join(f"{name} {calls[name]} times" for name in reached)
    figure = (
        f"{active} active, in conflict: {', '.join(conflicts) or 'none'}; called in {steps} steps: {named or 'none'}"
    )
    seldom = [name for name in CALLED if calls.get(name, 0) < steps]
    figure += f"; less than once a step: {', '.join(seldom)}" if seldom else ""
    return Verdict.of(figure, holds=not seldom and not conflicts)


CLAIMS = (
    trains_as_stock(
        LATENT,
        "Mamba-2, gated delta nets, sparse attention, latent attention, an MLP, experts and multi-token prediction train together "
        "by `megacpp_overlays run`, with stock's losses but for rounding",
    ),
    trains_as_stock(
        SOFTMAX,
        "so they do with softmax attention, which Megatron refuses beside sparse and latent attention, in the place of both",
    ),
    Claim(
        "megatron-layers-used",
        "overlays of these layers are called in every step; none is in conflict",
        used,
        asked=_trained,
    ),
    trains_as_stock(
        KERNELS, "so they do where gated delta nets compute by fla's kernels and not by Megatron's own lines in PyTorch"
    ),
)
