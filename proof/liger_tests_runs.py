"""Liger's own tests of this loss, of release 0.8.5, run against the release that is installed, without overlays and with."""

from __future__ import annotations

import json
import time
from pathlib import Path

from archives import LIGER, unpack
from claims import Found, Say, Workplace
from processes import ON_CPU, RUN, start

FILE = "test/transformers/test_fused_linear_cross_entropy.py"
LARGE = "8-128-1024-4096"
"""Cases of 1024 tokens over 4096 classes, which take minutes in Triton's interpreter: more than the rest of a proof."""
QUICK = "reduction_none or token_scaling or (test_correctness_functional and 2-2-8-8)"
PLUGIN = Path(__file__).resolve().parent / "launchers"
WAYS = ("without", "with")


def measure(place: Workplace, say: Say) -> Found:
    """Return how each test ended, without overlays and with."""
    root = unpack(place.archives, LIGER, "test", place.folder).parent
    (root / "pytest.ini").write_text("[pytest]\n")  # neither their settings nor those of a checkout around this folder
    chosen = QUICK if place.quick else f"not {LARGE}"
    found: Found = {"file": FILE, "chosen": chosen}
    for number, way in enumerate(WAYS, start=1):
        began = time.monotonic()
        kept = root / f"{way}.json"
        words = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "outcomes", "-k", chosen, FILE]
        start(
            words if way == "without" else [*RUN, *words],
            ON_CPU | {"PROOF_OUTCOMES": str(kept)},
            path=[PLUGIN],
            cwd=root,
            codes=(0, 1),
        )
        found[way] = json.loads(kept.read_text())
        counts = f"{len(found[way]['passed'])} passed, {len(found[way]['failed'])} failed"
        say(f"[{number}/{len(WAYS)}] Liger's tests {way} overlays: {counts}, {time.monotonic() - began:.0f} s")
    return found
