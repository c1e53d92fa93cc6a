"""Worlds of gloo ranks: forked from a process which had process groups of its own, and where one stood that did not end."""

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

AFTER_GARBAGE = """
import gc, os, torch
from megacpp_overlays.repro import worlds

gc.disable()
torch.distributed.init_process_group("gloo", init_method=f"file://{os.environ['MEET']}", rank=0, world_size=1)
garbage = [torch.distributed.group.WORLD]
torch.distributed.destroy_process_group()
garbage.append(garbage)
del garbage

def run(rank):
    gc.collect()
    return {"ranks": torch.distributed.get_world_size()}

print(worlds.on_ranks(2, run), flush=True)
os._exit(0)
"""

STANDING = """
import os, pathlib, time
from multiprocessing.process import BaseProcess
from megacpp_overlays.repro import worlds

def where_no_rank_goes_on(rank):
    pathlib.Path(os.environ["MEET"]).touch()
    while True:
        time.sleep(0.01)

def join(rank, timeout=None):
    while not pathlib.Path(os.environ["MEET"]).exists():
        time.sleep(0.01)

BaseProcess.join = join
try:
    worlds.on_ranks(1, where_no_rank_goes_on)
except worlds.RankError as error:
    print(error, flush=True)
"""


def test_groups_in_garbage_of_the_process_that_was_copied_do_not_hold_ranks_up(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_python(AFTER_GARBAGE, MEET=str(tmp_path / "meet"), MEGACPP_OVERLAYS="off")

    assert done.stdout.splitlines()[-1] == "{'rank 0, ranks': [2.0], 'rank 1, ranks': [2.0]}", done.stderr


def test_the_error_names_the_line_at_which_a_rank_stood(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_python(STANDING, MEET=str(tmp_path / "meet"), MEGACPP_OVERLAYS="off")

    assert "rank 0 did not end within 300 s\nrank 0 stood at\n" in done.stdout, done.stderr
    assert "in where_no_rank_goes_on" in done.stdout


@pytest.mark.upstream
def test_ranks_set_megatron_up_in_a_copy_of_a_process_whose_groups_are_gone(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_python(AFTER_GROUPS, MEET=str(tmp_path / "meet"), MEGACPP_OVERLAYS="off")

    assert done.stdout.splitlines()[-1] == "{'rank 0, ranks': [2.0], 'rank 1, ranks': [2.0]}", done.stderr
