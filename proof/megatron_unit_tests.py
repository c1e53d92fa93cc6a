"""Megatron-LM's own unit tests of the code that overlays replace, run without overlays and with: both ways of a group side by side."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from claims import Found, Say, Workplace
from megatron_checkout import ready_for_tests
from megatron_launcher import prepared
from megatron_unit_ends import count, differing
from megatron_unit_groups import GROUPS, Group
from megatron_unit_runs import Stand, run
from upstream_tests import WAYS

LIMIT_S = 150.0
"""After which a group begins no further test."""
QUICK = ("module", "mtp")
"""Groups that show that all of it works."""
MOST_AT_ONCE = 8
"""Runs of a group on the same devices, whose memory they share."""
TAKES = f"{len(GROUPS)} groups, 2 runs of pytest each, and 2 more where the first differ"


def measure(place: Workplace, say: Say) -> Found:
    """Return how each test of each group ended, and how those of groups did once more whose two ways differ."""
    groups = [group for group in GROUPS if not place.quick or group.id in QUICK]
    site = prepared(place)
    first = site.checkout.folder
    ready_for_tests(first, place.checkout or first)
    shutil.copytree(first, second := first.with_name("second"))
    sides = [
        Stand(root, site.sizes.env, site.sizes.path, armed, LIMIT_S, place.ranks)
        for root, armed in ((first, False), (second, True))
    ]
    found: Found = {key: site.about()[key] for key in ("checkout", "host")}
    found |= {"ranks": place.ranks, "limit_s": LIMIT_S, "groups": _both(groups, sides, say), "again": {}}
    if again := [group for group in groups if differing(found["groups"][group.id])]:
        say(f"once more, because the two ways differ: {', '.join(group.title for group in again)}")
        found["again"] = _both(again, sides, say)
    return found


def _both(groups: Sequence[Group], sides: Sequence[Stand], say: Say) -> Found:
    """Return the outcomes of groups by id and way; as many processes at once as fit."""
    ranks = max(stand.ranks for stand in sides)
    workers = max(2, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // (2 * ranks)))

    def timed(group: Group, stand: Stand) -> Found:
        began = time.monotonic()
        done = run(group, stand)
        counts = ", ".join(f"{count(done, kind)} {kind}" for kind in ("passed", "failed", "skipped"))
        way = WAYS[stand.armed]
        cut = f"; {done['stopped']}, {count(done, 'unreached')} not reached" if done["stopped"] else ""
        say(f"{group.title}, {way} overlays: {counts}{cut}; {time.monotonic() - began:.0f} s")
        return done

    with ThreadPoolExecutor(workers) as pool:
        waiting = {
            group.id: {WAYS[stand.armed]: pool.submit(timed, group, stand) for stand in sides} for group in groups
        }
        return {name: {way: each.result() for way, each in ways.items()} for name, ways in waiting.items()}
