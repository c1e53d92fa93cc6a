"""Worlds of gloo ranks that are forked from a process which had process groups of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

AFTER_GROUPS = """
import os, sys, torch
from megatron.core import parallel_state
from megacpp_overlays.repro import worlds

torch.distributed.init_process_group("gloo", init_method=f"file://{os.environ['MEET']}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
parallel_state.destroy_model_parallel()
torch.distributed.destroy_process_group()
left = [name for name, value in vars(parallel_state).items() if isinstance(value, torch.distributed.ProcessGroup)]
assert left, "Megatron leaves no group, so this shows nothing"

def run(rank):
    parallel_state.initialize_model_parallel()
    return {"ranks": torch.distributed.get_world_size()}

print(worlds.on_ranks(2, run), flush=True)
os._exit(0)
"""


@pytest.mark.upstream
def test_ranks_set_megatron_up_in_a_copy_of_a_process_whose_groups_are_gone(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_python(AFTER_GROUPS, MEET=str(tmp_path / "meet"), MEGACPP_OVERLAYS="off")

    assert done.stdout.splitlines()[-1] == "{'rank 0, ranks': [2.0], 'rank 1, ranks': [2.0]}", done.stderr
