"""Counters that ncu prints, as the page of attention over chosen keys has them."""

from __future__ import annotations

import csv
import importlib
import io
from types import ModuleType

import pytest

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
def counters() -> ModuleType:
    return importlib.import_module("sparse_attention.counters")


def printed(*launches: tuple[str, str, dict[str, str], str]) -> str:
    """Return the table that ncu prints of launches: identity, kernel, metrics, and the text of a rule."""
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


def sampled(*code: tuple[str, int]) -> str:
    """Return the table that ncu prints of machine code with samples."""
    text = io.StringIO()
    write = csv.writer(text, quoting=csv.QUOTE_ALL)
    write.writerow(("Kernel Name", "attend_rows"))
    write.writerow(("Address", "Source", "# Samples"))
    for place, (instruction, samples) in enumerate(code):
        write.writerow((hex(place), instruction, samples))
    return f"==PROF== Connected to process 1\n{text.getvalue()}"


def test_samples_are_distributed_over_the_operations_that_the_softmax_waits_for(counters: ModuleType) -> None:
    code = sampled(
        *(("SYNCS.PHASECHK.TRANS64.TRYWAIT P0", 1000), ("HGMMA.64x256x16.F32.BF16 R24", 1000)),  # other warps
        *(("SYNCS.PHASECHK.TRANS64.TRYWAIT P1", 1), ("@!P1 BRA 0x1", 9), ("FENCE.VIEW.ASYNC.S", 0)),
        *(("HGMMA.64x64x16.F32.BF16 R24", 20), ("HGMMA.64x64x16.F32.BF16 R24", 30), ("WARPGROUP.DEPBAR.LE gsb0", 10)),
        *(("MUFU.EX2 R24", 20), ("@!P1 BRA 0x2", 5), ("SYNCS.ARRIVE.TRANS64.A1T0 RZ", 3), ("@P1 BRA 0x3", 2)),
        ("FMUL R79", 1000),
    )

    assert counters.shares(code) == {"keys": 0.1, "product": 0.6, "softmax": 0.3}


def test_a_kernel_whose_warps_do_not_share_out_the_work_has_no_shares(counters: ModuleType) -> None:
    assert counters.shares(sampled(("HGMMA.64x128x16.F32.BF16 R24", 4))) is None


@pytest.mark.parametrize(
    ("shape", "tiles"), [("4096x4096x128x576x512", 4096 * 2 * 32), ("64x64x65x576x512x128", 64 * 2 * 2)]
)
def test_the_cycles_of_a_tile_are_said_with_the_shares(counters: ModuleType, shape: str, tiles: int) -> None:
    kernels = {"attend_rows": {"ns": 1e3 * tiles, "hz": 1e9}}
    each = {"shape": shape, "kernels": kernels, "samples": {"keys": 0.1, "product": 0.6, "softmax": 0.3}}

    said = counters.said_of_samples(each, 2)

    assert "takes 2,000 cycles" in said
    assert said.endswith(
        "spend 10% of them until keys are there, 60% in the product of queries and keys, 30% in the softmax."
    )
