"""Tests of an upstream, run without overlays and with: their outcomes, and the overlays that they called."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from claims import Found, Say
from processes import RUN, start

LAUNCHERS = Path(__file__).resolve().parent / "launchers"
PYTEST = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "outcomes")
WAYS = ("without", "with")


def both_ways(
    whose: str, chosen: Sequence[str], env: Mapping[str, str], path: Sequence[Path], root: Path, say: Say
) -> Found:
    """Return the outcomes of both runs by `without` and `with`, those of `with` with calls and conflicts of overlays.

    Args:
        whose: tests they are, for lines of progress.
        chosen: words for pytest: files, and which of their tests.
        env: see `processes.start`.
        path: folders that come first on Python's path, before that of the plugin.
        root: where they are run; outcomes are left there.
        say: called with each line of progress.
    """
    (root / "pytest.ini").write_text("[pytest]\n")  # neither their settings nor those of a checkout around this folder
    found: Found = {}
    for number, way in enumerate(WAYS, start=1):
        began = time.monotonic()
        kept = root / f"{way}.json"
        start(
            [*(RUN if way == "with" else ()), *PYTEST, *chosen],
            {**env, "PROOF_OUTCOMES": str(kept)},
            path=[*path, LAUNCHERS],
            cwd=root,
            codes=(0, 1),
        )
        found[way] = ended = json.loads(kept.read_text())
        if way == "with":
            audit = ended.pop("audit")
            ended["calls"] = calls(audit)
            ended["conflicts"] = [each["id"] for each in audit if each["decision"] == "conflict"]
        counts = f"{len(ended['passed'])} passed, {len(ended['failed'])} failed"
        say(f"[{number}/{len(WAYS)}] {whose} tests {way} overlays: {counts}, {time.monotonic() - began:.0f} s")
    return found


def calls(decisions: Sequence[Found]) -> dict[str, int]:
    """Return how often the seams of each overlay were called, of those that were, from the decisions of an audit."""
    return {each["id"]: count for each in decisions if (count := sum(each["calls"].values()))}
