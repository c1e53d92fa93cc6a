"""Ranks that are forked copies: none leaves while another may still send to it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from places import SUPPORT

LATE = """
import os, time
from pathlib import Path
import torch
import forked_ranks

def find(rank):
    if rank == 0:
        return "left"
    time.sleep(1)  # the other one is through by now
    torch.distributed.isend(torch.ones(1), dst=0)
    return "sent"

print(forked_ranks.on_ranks(2, Path(os.environ["FOLDER"]), find))
"""


def test_a_rank_may_send_when_the_other_one_has_found_all_that_it_looked_for(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_python(LATE, SUPPORT, check=False, FOLDER=str(tmp_path / "ranks"))

    assert done.stdout == "['left', 'sent']\n", done.stderr
