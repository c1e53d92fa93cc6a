"""Counters that ncu prints, as the page of attention over chosen keys has them."""

from __future__ import annotations

import csv
import importlib
import io
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from places import ROOT

HEAD = (
    "ID",
    "Kernel Name",
    "Section Name",
    "Metric Name",
    "Metric Unit",
    "Metric Value",
    "Rule Name",
    "Rule Description",
)
NUMBERS = {
    "Duration": "4,685,536",
    "SM Frequency": "1,804,101,147.66",
    "L1/TEX Cache Throughput": "53.26",
    "L2 Cache Throughput": "39.05",
    "DRAM Throughput": "5.17",
    "Issue Slots Busy": "28.12",
    "Achieved Active Warps Per SM": "12.00",
    "Registers Per Thread": "168",
    "Grid Size": "8,192",
    "Stack Size": "1,024",
}


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import it as the programs do, and leave nothing behind."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("sparse_attention.counters")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def printed(*launches: tuple[str, str, dict[str, str], str]) -> str:
    """Return what ncu prints of launches: identity, kernel, metrics, and what a rule says."""
    text = io.StringIO()
    write = csv.writer(text, quoting=csv.QUOTE_ALL)
    write.writerow(HEAD)
    for identity, kernel, metrics, rule in launches:
        for name, value in metrics.items():
            write.writerow((identity, kernel, "a section", name, "", value, "", ""))
        write.writerow((identity, kernel, "a section", "", "", "", "HighPipeUtilization", rule))
    return f"==PROF== Connected to process 1\n{text.getvalue()}"


def test_the_first_launch_of_a_kernel_counts(counters: ModuleType) -> None:
    tensor = "Tensor is the highest-utilized pipeline (51.1%) based on elapsed cycles in the workload."
    later = {**NUMBERS, "Duration": "1"}

    found = counters.read(printed(("0", "attend_rows", NUMBERS, tensor), ("1", "attend_rows", later, "")))

    assert list(found) == ["attend_rows"]
    assert found["attend_rows"] | {"ns": 4685536.0, "pipe": "Tensor", "pipe_busy": 51.1} == found["attend_rows"]


def test_a_rate_is_that_of_tensor_cores_at_the_clock_of_the_launch(counters: ModuleType) -> None:
    tensor = "Tensor is the highest-utilized pipeline (50.0%) based on elapsed cycles in the workload."
    idle = "All compute pipelines are under-utilized."
    found = counters.read(printed(("0", "attend_rows", NUMBERS, tensor), ("1", "sum_slots", NUMBERS, idle)))

    rows = [counters.row(name, one, 132) for name, one in found.items()]

    assert rows[0][:5] == ["attend_rows", "4.69", "1.80", "Tensor, 50%", "488"]
    assert rows[1][3:5] == ["-", "-"]
