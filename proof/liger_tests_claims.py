"""What is claimed of Liger's own tests under overlays, and how each claim is judged."""

from __future__ import annotations

from claims import Claim, Found, Outcome, Verdict

REGRESSION = "test_correctness_reduction_none_per_token_grad_output"
"""Upstream's own test of the defect, which came with its repair."""


def repaired(found: Found) -> list[str]:
    """Return the tests that pass with overlays and fail without."""
    return sorted(set(found["with"]["passed"]) & set(found["without"]["failed"]))


def none_lost(found: Found) -> Verdict:
    """Judge that what passes without overlays passes with them."""
    without, with_overlays = (set(found[way]["passed"]) for way in ("without", "with"))
    lost = sorted(without - with_overlays)
    figure = f"{len(without)} pass without, {len(with_overlays)} with; lost: {', '.join(lost) or 'none'}"
    return Verdict.of(figure, holds=bool(without) and not lost)


def regression_tests_pass(found: Found) -> Verdict:
    """Judge that upstream's own tests of the defect fail without overlays and pass with them."""
    about = {
        way: {name for kind in ("passed", "failed") for name in found[way][kind] if REGRESSION in name}
        for way in ("without", "with")
    }
    mended = [name for name in repaired(found) if REGRESSION in name]
    figure = f"{len(mended)} of {len(about['with'])} fail without and pass with"
    return Verdict.of(figure, holds=bool(mended) and set(mended) == about["with"] == about["without"])


def rest_is_upstreams(found: Found) -> Verdict:
    """Judge what fails with overlays: it has to fail without them, with the same error."""
    failed, stock = found["with"]["failed"], found["without"]["failed"]
    ours = sorted(name for name, error in failed.items() if stock.get(name) != error)
    if ours:
        return Verdict(Outcome.FAILS, f"{len(ours)} fail otherwise than without overlays: {', '.join(ours)}")
    if not failed:
        return Verdict(Outcome.HOLDS, "nothing fails")
    errors = "; ".join(sorted(set(failed.values())))
    return Verdict(Outcome.UPSTREAM, f"{len(failed)} fail without overlays, too, with the same error: {errors}")


CLAIMS = (
    Claim("liger-tests-kept", "of Liger's own tests, what passes without overlays passes with them", none_lost),
    Claim(
        "liger-tests-repaired",
        "Liger's own regression tests of the defect pass with them, on 0.8.1",
        regression_tests_pass,
    ),
    Claim("liger-tests-rest", "what fails with them is upstream's own failure on this host", rest_is_upstreams),
)
