"""Liger's own tests of this loss, of release 0.8.5, run against the release that is installed, without overlays and with."""

from __future__ import annotations

from archives import LIGER, unpack
from claims import Found, Say, Workplace
from processes import ON_CPU
from upstream_tests import both_ways

FILE = "test/transformers/test_fused_linear_cross_entropy.py"
LARGE = "8-128-1024-4096"
"""Cases of 1024 tokens over 4096 classes, which take minutes in Triton's interpreter: more than the rest of a proof."""
QUICK = "reduction_none or token_scaling or (test_correctness_functional and 2-2-8-8)"


def measure(place: Workplace, say: Say) -> Found:
    """Return how each test ended, without overlays and with."""
    root = unpack(place.archives, LIGER, "test", place.folder).parent
    chosen = QUICK if place.quick else f"not {LARGE}"
    return {"file": FILE, "chosen": chosen, **both_ways("Liger's", ["-k", chosen, FILE], ON_CPU, [], root, say)}
