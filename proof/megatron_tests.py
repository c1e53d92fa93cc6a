"""Run Megatron-LM's own tests of sparse attention without and with overlays, and judge the claims about them."""

from __future__ import annotations

from claims import Claim, Found, Say, Verdict, Workplace
from kept_tests import none_lost, rest_is_upstreams
from megatron_checkout import TESTS, WAY_OUT, copied, ready_for_tests
from megatron_sizes import sizes
from processes import ProofError
from upstream_tests import both_ways

USED = ("dsa-sparse-attention", "dsa-indexer-streaming")
"""Overlays that these tests must call."""
RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29641", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def measure(place: Workplace, say: Say) -> Found:
    """Return the outcome of each test, and the calls of overlays."""
    if place.checkout is None:
        raise ProofError(f"no checkout of Megatron-LM was given: {WAY_OUT}")
    (copy := place.folder / "checkout").mkdir()
    folder = copied(place.checkout, copy).folder
    ready_for_tests(folder, place.checkout)
    chosen = sizes(quick=place.quick)
    env, path = {**chosen.env, **RENDEZVOUS}, [*chosen.path, folder]
    return {"folder": TESTS, **both_ways("Megatron's", [TESTS], env, path, folder, say)}


def used(found: Found) -> Verdict:
    """Judge that the tests call each of `USED`, and that no overlay is in conflict."""
    calls, conflicts = found["with"]["calls"], found["with"]["conflicts"]
    named = ", ".join(f"{name} {count} times" for name, count in sorted(calls.items(), key=lambda each: -each[1]))
    figure = f"called: {named or 'none'}; in conflict: {', '.join(conflicts) or 'none'}"
    return Verdict.of(figure, holds=all(calls.get(name, 0) for name in USED) and not conflicts)


CLAIMS = (
    Claim(
        "megatron-tests-kept",
        "of Megatron-LM's own tests of sparse attention, what passes without overlays passes with them",
        none_lost,
    ),
    Claim("megatron-tests-used", "they call what overlays replace", used),
    Claim("megatron-tests-rest", "what fails with overlays is upstream's own failure on this host", rest_is_upstreams),
)
