"""The order of tests, and their grouping on workers of pytest-xdist: by file, or by release where it has a long run."""

from __future__ import annotations

import re
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

FIRST = ("loader", "source", "upkeep", "cli", "repro", "probes", "processes")
"""Rooms whose tests run first: Python takes longer for their requests the larger its heap is, and upstreams fill it."""
LONGEST = (
    "test_dynamo.py",
    "test_lanes.py",
    "test_float16_fp32_exemption.py",
    "test_hopper_flce_dispatch.py",
    "test_index_scores.py",
    "test_liger_flce_none_backward.py",
    "test_portable_entry.py",
    "test_proof_cpu.py",
    "test_differential.py",
    "test_demo.py",
    "test_mamba_packed_seq_idx.py",
)
"""Files that take longest. They are next, or one worker would end long after the others."""
SPLIT = {
    "test_liger_flce_none_backward.py": re.compile(r"\[(?:.*-)?(\d+\.\d+\.\d+)[-\]]|(logits_that_were_kept)"),
}
"""Files whose tests share a long run for each of several groups, and the part of a test's name that says its group."""


def turn(file: Path) -> int:
    """Return a number by which the files of tests are put in order."""
    if file.parent.name in FIRST:
        return FIRST.index(file.parent.name) - len(FIRST)
    return LONGEST.index(file.name) if file.name in LONGEST else len(LONGEST)


def unit(test: str) -> str:
    """Return the name of the unit of work that a test belongs to."""
    file = test.partition("::")[0]
    pattern = SPLIT.get(file.rpartition("/")[2])
    found = None if pattern is None else pattern.search(test)
    return file if found is None else f"{file} {found[1] or found[2]}"


class SharedRunScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Files as units of work, but for those that are split.

    A mark `xdist_group` on the tests would do the same; pytest-xdist 3.8 loses it with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
