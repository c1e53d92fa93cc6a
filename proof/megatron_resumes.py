"""Checkpoints of Megatron-LM's own launcher: runs that save and runs that go on from them, stock and with overlays, and their claims."""

from __future__ import annotations

from collections.abc import Callable

from claims import Claim, Found, Outcome, Say, Verdict, Workplace
from megatron_claims import over_ranks, run
from megatron_launcher import prepared
from megatron_launches import BOTH, Launch, Layout, Way, all_of
from megatron_series import ROUNDING, apart


def saved(way: Way, layout: Layout = Layout.ONE) -> Launch:
    """Return the run that leaves a checkpoint half-way."""
    return Launch(way, layout, saves=True)


PRINTED = 2e-6
"""Relative, of a loss: Megatron prints seven digits, and one of them is the mean of two that were printed."""
SAVED = tuple(saved(way, layout) for layout in (Layout.ONE, Layout.DATA) for way in BOTH)
RESHARDED = tuple(Launch(way, resumes=saved(way, Layout.DATA)) for way in BOTH)
"""These go on over another number of ranks. They may fail: without Transformer Engine and Apex, Megatron's own do."""
LAUNCHES = (*SAVED, *(Launch(way, resumes=saved(source)) for way in BOTH for source in BOTH), *RESHARDED)
TAKES = f"6 launches on one GPU, {len(LAUNCHES)} elsewhere"


def measure(place: Workplace, say: Say) -> Found:
    """Return the log of each launch, and the version of the checkout."""
    site = prepared(place)
    runs = all_of(LAUNCHES, site, say, may_fail=RESHARDED)
    return {**site.about(), "steps": site.sizes.steps, "saved": site.sizes.saved, "runs": runs}


def first(found: Found, way: Way, source: Launch) -> tuple[float, float]:
    """Return the first loss after a resume, and that of the same step of the run that left the checkpoint."""
    resumed, whole = run(found, Launch(way, resumes=source)), run(found, source)
    return resumed["losses"][0], whole["losses"][whole["iterations"].index(resumed["iterations"][0])]


def begins_alike(found: Found, way: Way, source: Launch) -> Verdict:
    """Judge that the first loss after a resume is that of the run that left the checkpoint, but for rounding."""
    resumed, whole = first(found, way, source)
    figure = f"step {found['saved'] + 1}: {resumed:.6f}, of the run that went on {whole:.6f}"
    return Verdict.of(figure, holds=abs(resumed - whole) / whole <= ROUNDING)


def goes_on(found: Found) -> Verdict:
    """Judge that a resumed run has the losses of the run that went on, as it does without overlays."""
    ours, whole = first(found, Way.OVERLAYS, saved(Way.OVERLAYS))
    begins = {way: len(set(first(found, way, saved(way)))) == 1 for way in BOTH}
    later = {way: apart_later(run(found, Launch(way, resumes=saved(way))), run(found, saved(way))) for way in BOTH}
    figure = f"step {found['saved'] + 1}: {ours:.6f}, of the run that went on {whole:.6f}; "
    figure += f"later steps differ by {later[Way.OVERLAYS]:.1e}, of stock by {later[Way.STOCK]:.1e}"
    alike = {way: begins[way] and later[way] <= PRINTED for way in BOTH}
    if alike[Way.OVERLAYS]:
        return Verdict(Outcome.HOLDS, figure)
    return Verdict(Outcome.FAILS if alike[Way.STOCK] else Outcome.UPSTREAM, figure)


def apart_later(resumed: Found, whole: Found) -> float:
    """Return the largest relative difference of two runs' losses after the first step of one that resumed.

    A process of Megatron does not reset its sums after its first step, so the loss that it logs for the second is the mean of both
    (`training_log`, where `is_first_iteration`).
    """
    begin = whole["iterations"].index(resumed["iterations"][0])
    first, second, *rest = whole["losses"][begin:]
    return apart(resumed["losses"][1:], [(first + second) / 2, *rest])


def exchanged(way: Way, source: Way) -> Callable[[Found], Verdict]:
    """Return the judge of a claim that one way goes on from a checkpoint of the other."""
    return lambda found: begins_alike(found, way, saved(source))


def reshards(found: Found) -> Verdict:
    """Judge that a checkpoint of two data-parallel ranks is gone on from by one, or that stock fails in the same way."""
    stock, ours = (run(found, each) for each in RESHARDED)
    if "error" in ours:
        outcome = Outcome.UPSTREAM if stock.get("error") == ours["error"] else Outcome.FAILS
        return Verdict(outcome, f"{ours['error']}; stock: {stock.get('error', 'goes on')}")
    return begins_alike(found, Way.OVERLAYS, saved(Way.OVERLAYS, Layout.DATA))


CLAIMS = (
    Claim("megatron-resumes", "a run with overlays goes on from its checkpoint as a stock run does", goes_on),
    Claim(
        "megatron-stock-resumes",
        "stock goes on from a checkpoint that was saved with overlays",
        exchanged(Way.STOCK, Way.OVERLAYS),
    ),
    Claim(
        "megatron-overlays-resume",
        "with overlays a run goes on from a checkpoint of stock",
        exchanged(Way.OVERLAYS, Way.STOCK),
    ),
    Claim(
        "megatron-reshards",
        "with overlays one rank goes on from a checkpoint of two data-parallel ranks and Megatron's distributed optimizer",
        reshards,
        over_ranks(RESHARDED[-1]),
    ),
)
