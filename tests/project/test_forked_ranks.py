"""Ranks that are forked copies: none leaves while another may still send to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from places import SUPPORT

LATE = """
import sys, time
from pathlib import Path
import torch
import forked_ranks

def find(rank):
    if rank == 0:
        return "left"
    time.sleep(1)  # the other one is through by now
    torch.distributed.isend(torch.ones(1), dst=0)
    return "sent"

print(forked_ranks.on_ranks(2, Path(sys.argv[1]), find))
"""


def test_a_rank_may_send_when_the_other_one_has_found_all_that_it_looked_for(
    run_python: Callable[..., object], tmp_path: Path
) -> None:
    done = run_python(LATE.replace("sys.argv[1]", repr(str(tmp_path / "ranks"))), SUPPORT, check=False)

    assert done.stdout == "['left', 'sent']\n", done.stderr  # type: ignore[attr-defined]
