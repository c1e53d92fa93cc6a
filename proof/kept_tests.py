"""Claims about upstream's own tests under overlays: outcomes without them and with them."""

from __future__ import annotations

from claims import Found, Outcome, Verdict
from report import table


def repaired(found: Found) -> list[str]:
    """Return the tests that pass with overlays and fail without."""
    return sorted(set(found["with"]["passed"]) & set(found["without"]["failed"]))


def none_lost(found: Found) -> Verdict:
    """Judge that every test that passes without overlays passes with them."""
    without, with_overlays = (set(found[way]["passed"]) for way in ("without", "with"))
    lost = sorted(without - with_overlays)
    figure = f"{len(without)} pass without, {len(with_overlays)} with; lost: {', '.join(lost) or 'none'}"
    return Verdict.of(figure, holds=bool(without) and not lost)


def rest_is_upstreams(found: Found) -> Verdict:
    """Judge that every test that fails with overlays fails without them, with the same error."""
    failed, stock = found["with"]["failed"], found["without"]["failed"]
    ours = sorted(name for name, error in failed.items() if stock.get(name) != error)
    if ours:
        return Verdict(Outcome.FAILS, f"{len(ours)} fail otherwise than without overlays: {', '.join(ours)}")
    if not failed:
        return Verdict(Outcome.HOLDS, "nothing fails")
    counts: dict[str, int] = {}
    for error in failed.values():
        counts[error] = counts.get(error, 0) + 1
    errors = "; ".join(sorted(counts, key=lambda error: (-counts[error], error))[:MOST])
    same = "the same error" if len(counts) == 1 else f"the same {len(counts)} errors, such as"
    return Verdict(Outcome.UPSTREAM, f"{len(failed)} fail without overlays, too, with {same}: {errors}")


MOST = 4
"""Errors that are quoted, the most frequent first."""


def outcomes(found: Found) -> list[str]:
    """Return the lines of a table of how many tests ended how."""
    kinds = ("passed", "failed", "skipped")
    rows = [[way, *(str(len(found[way][kind])) for kind in kinds)] for way in ("without", "with")]
    return table(["overlays", *kinds], rows)
