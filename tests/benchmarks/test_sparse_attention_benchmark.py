"""The benchmark of attention over chosen keys, on a CPU: the whole run at tiny sizes, and the rows of peers that have a forward pass only.

FlashMLA and TileLang's example need a GPU; functions of the same signatures stand in for them, and compute in float32.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_runs import run_quickly
from places import ROOT

from megacpp_overlays.kernels.sparse_attention import reference

FOLDER = ROOT / "benchmarks/sparse_attention"
EXAMPLE = """
import stand_in

def sparse_mla_fwd_interface(q, kv, indices, q_start_index_s, kv_stride, sm_scale=None, is_casual=True):
    assert q.is_contiguous() and kv.is_contiguous() and indices.is_contiguous()
    assert q.shape[0] == kv.shape[0] == indices.shape[0] == kv.shape[2] == indices.shape[2] == kv_stride == 1
    assert q_start_index_s >= kv.shape[1]  # no key is in the future of a query
    return stand_in.attend(q[0], kv[0], indices[0], sm_scale)[None], None
"""


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the benchmark's own module, without Megatron."""
    module = importlib.import_module("sparse_attention.work")
    monkeypatch.setattr(module, "megatron", lambda *_: None)
    return module


def attend(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the output of (queries, heads, 576), (keys, 1, 576) and (queries, 1, slots)."""
    output, _ = reference.attend(query[:, None].float(), key[:, None].float(), indices.transpose(0, 1), scale, 512)
    return output[:, 0].to(query.dtype)


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_mla_sparse_fwd(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512
    ) -> tuple[torch.Tensor, None, None]:
        assert q.stride(-1) == kv.stride(-1) == indices.stride(-1) == 1
        assert (q.shape[1:], kv.shape[1:], indices.shape[1], indices.dtype) == ((64, 576), (1, 576), 1, torch.int32)
        return attend(q, kv, indices, sm_scale), None, None

    module = ModuleType("flash_mla")
    module.__dict__["flash_mla_sparse_fwd"] = flash_mla_sparse_fwd
    monkeypatch.setitem(sys.modules, "flash_mla", module)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the file of an example."""
    module = ModuleType("stand_in")
    module.__dict__["attend"] = attend
    monkeypatch.setitem(sys.modules, "stand_in", module)
    path = tmp_path / "sparse_mla_fwd_pipelined.py"
    path.write_text(EXAMPLE)
    return path


@pytest.mark.usefixtures("flash_mla")
def test_peers_get_the_same_problem_and_have_a_forward_pass_alone(work: Any, example: Path) -> None:
    shape = work.Shape.parse("4x256x64x576x512x128")
    problem = work.problem(shape, "cpu")

    who = work.contestants(shape, example)

    for name in ("FlashMLA", "TileLang's example"):
        assert len(work.stages(name, who[name], problem)) == 1
        errors = work.errors(name, who[name], problem, 4)
        assert errors.keys() == {"output"}
        assert errors["output"] < 5e-3
    assert len(work.stages("ours", who["ours"], problem)) == 2


@pytest.mark.usefixtures("flash_mla")
@pytest.mark.parametrize("shape", ["4x256x16x576x512x128", "4x256x64x320x256x128", "4x256x64x576x512x96"])
def test_peers_get_no_inputs_that_they_do_not_support(work: Any, example: Path, shape: str) -> None:
    assert not {"FlashMLA", "TileLang's example"} & work.contestants(work.Shape.parse(shape), example).keys()


def test_who_is_not_here_is_no_contestant_and_a_file_that_is_not_here_is_an_error(work: Any, tmp_path: Path) -> None:
    shape = work.Shape.parse("4x256x64x576x512x128")

    assert not {"FlashMLA", "TileLang's example"} & work.contestants(shape).keys()
    with pytest.raises(FileNotFoundError, match=r"sparse_mla_fwd_pipelined\.py of TileLang's examples"):
        work.contestants(shape, tmp_path / "absent.py")


def test_a_forward_pass_alone_has_a_rate_and_no_backward_pass_in_the_page(work: Any) -> None:
    page = importlib.import_module("sparse_attention.page")
    shape = {"forward_flops": 2e12, "backward_flops": 5e12}

    peer = page.row("FlashMLA", {"ms": 4.25, "stages": [4.25], "mib": 512.0, "errors": {"output": 2e-3}}, shape)
    gather = page.row("a gather of the keys", {"ms": 5.25, "stages": [5.25]}, shape)

    assert peer == ["FlashMLA", "4.25", "471", "-", "-", "512", "2.0e-03", "-", "-"]
    assert gather == ["a gather of the keys", "5.25", *["-"] * 7]


@pytest.mark.full
def test_the_whole_run_writes_numbers_page_and_plot(tmp_path: Path) -> None:
    run_quickly(FOLDER, tmp_path, "--plot", str(tmp_path / "plot.svg"))

    found = json.loads((tmp_path / "found.json").read_text())
    assert found["problems"] == []
    (shape,) = found["shapes"]
    assert shape["contestants"]["ours"]["errors"]["output"] < 1e-2
    assert "| ours |" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
