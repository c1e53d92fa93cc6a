"""Which tests go to one worker of pytest-xdist together: those of a file, or of one release where each has a long run."""

from __future__ import annotations

import re

from xdist.scheduler import LoadFileScheduling

SPLIT = {
    "test_liger_flce_none_backward.py": re.compile(r"\[(?:.*-)?(\d+\.\d+\.\d+)[-\]]|(logits_that_were_kept)"),
}
"""Files whose tests share something for each of several groups, and what in the name of a test says its group."""


class SharedRunScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Files as units of work, but for those that are split.

    A mark `xdist_group` would say the same beside the tests; pytest-xdist 3.8 loses it with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        pattern = SPLIT.get(file.rpartition("/")[2])
        found = None if pattern is None else pattern.search(nodeid)
        return file if found is None else f"{file} {found[1] or found[2]}"
