"""Claims about Liger's own tests under overlays, and their judgement."""

from __future__ import annotations

from claims import Claim, Found, Verdict
from kept_tests import none_lost, repaired, rest_is_upstreams

REGRESSION = "test_correctness_reduction_none_per_token_grad_output"
"""Upstream's own test of the defect, which came with its repair."""


def regression_tests_pass(found: Found) -> Verdict:
    """Judge that upstream's own tests of the defect fail without overlays and pass with them."""
    about = {
        way: {name for kind in ("passed", "failed") for name in found[way][kind] if REGRESSION in name}
        for way in ("without", "with")
    }
    mended = [name for name in repaired(found) if REGRESSION in name]
    figure = f"{len(mended)} of {len(about['with'])} fail without and pass with"
    return Verdict.of(figure, holds=bool(mended) and set(mended) == about["with"] == about["without"])


CLAIMS = (
    Claim("liger-tests-kept", "of Liger's own tests, what passes without overlays passes with them", none_lost),
    Claim(
        "liger-tests-repaired",
        "Liger's own regression tests of the defect pass with them, on 0.8.1",
        regression_tests_pass,
    ),
    Claim("liger-tests-rest", "what fails with them is upstream's own failure on this host", rest_is_upstreams),
)
