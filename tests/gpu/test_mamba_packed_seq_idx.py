"""Pack 22 on a GPU: a real MambaMixer with mamba-ssm's own kernels on packed rows, captured and replayed, and across ranks.

Needs megatron-core 0.17.0 or newer, mamba-ssm (any build) and einops; without causal-conv1d the convolution is plain PyTorch.
Everything runs in fresh interpreters that import megacpp_overlays first, as a launcher does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import HANG_S, ROOT, SUPPORT

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]

OFF = {"MEGACPP_OVERLAY_MAMBA_PACKED_SEQ_IDX": "off"}
PACKINGS = ("ends of chunks", "within chunks", "padded", "tail", "one document")
ROUNDING = 1e-5
"""Relative, of the largest value: products in fp32, in the order of a GPU's blocks."""
SUMS = 5e-5
"""The same of gradients of parameters, which are sums over all tokens of a row, in another order than alone."""


def start(script: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    if any(importlib.util.find_spec(name) is None for name in ("mamba_ssm", "einops")):
        pytest.skip("needs mamba-ssm and einops")
    path = os.pathsep.join([str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    exact = {"TRITON_F32_DEFAULT": "ieee", "MAMBA_DETERMINISTIC": "1", "TRITON_INTERPRET": "0"}
    env = {**os.environ, "PYTHONPATH": path, "MEGACPP_OVERLAYS_LOG": "logging", **exact, **variables}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / script), *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def too_far(apart: dict[str, float]) -> dict[str, float]:
    """Return the tensors that differ by more than rounding."""
    return {name: by for name, by in apart.items() if not by < (SUMS if name == "parameters" else ROUNDING)}


def answer(process: subprocess.Popen[str]) -> Any:
    out, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, error[-6000:]
    return json.loads(out) if out else None


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    ways = {"on": start("packed_mixer_facts.py"), "off": start("packed_mixer_facts.py", **OFF)}
    return {way: answer(process) for way, process in ways.items()}


@pytest.mark.parametrize("packing", PACKINGS)
def test_documents_of_a_row_get_what_they_get_alone(packing: str, facts: dict[str, Any]) -> None:
    assert (facts["on"]["decision"], facts["on"]["device"]) == ("active", "cuda")
    assert too_far(facts["on"]["packings"][packing]["apart"]) == {}


@pytest.mark.parametrize("packing", PACKINGS[:-1])
def test_without_the_overlay_they_do_not(packing: str, facts: dict[str, Any]) -> None:
    assert facts["off"]["packings"][packing]["apart"]["output"] > 0.1


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_bits_are_those_of_upstream_that_is_told_the_tokens(packing: str, facts: dict[str, Any]) -> None:
    assert facts["on"]["packings"][packing]["as explicit"]
    assert facts["on"]["packings"][packing]["explicit"] == facts["off"]["packings"][packing]["explicit"]
    assert facts["on"]["not packed"] == facts["off"]["not packed"]


def test_other_forms_of_a_mixer_keep_documents_apart_too(facts: dict[str, Any]) -> None:
    for apart in facts["on"]["variants"].values():
        assert too_far(apart) == {}


@pytest.fixture(scope="module")
def graph() -> dict[str, Any]:
    found: dict[str, Any] = answer(start("packed_mixer_graph.py"))
    return found


@pytest.mark.parametrize("replay", ["other documents", "captured again", "shorter"])
def test_a_replayed_graph_sees_the_documents_that_its_boundaries_hold_then(replay: str, graph: dict[str, Any]) -> None:
    assert too_far(graph["replays"][replay]) == {}


def test_the_host_never_waits(graph: dict[str, Any]) -> None:
    assert graph["waits"] is None


@pytest.mark.parametrize("variables", [{}, OFF], ids=["on", "off"])
def test_two_context_parallel_ranks(variables: dict[str, str], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = [start("packed_mixer_rank.py", str(rank), str(tmp_path / "meet"), **variables) for rank in range(2)]
    found, _ = [answer(each) for each in ranks]

    assert (found["apart"]["output"] > 0.1) if variables else too_far(found["apart"]) == {}
