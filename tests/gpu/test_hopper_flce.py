"""Pack 10 on a GPU: Megatron's public `linear_cross_entropy`, served by the portable entry, against float64.

Our stand-in for Megatron-LM dev, and every tree given with `--upstream-tree` whose dispatcher knows Blackwell alone.
Each test is an interpreter of its own. The two ranks take a GPU each where there are two; on one GPU they share it, with
gloo and without sequence parallelism, whose gather gloo does not have for CUDA tensors.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from portable_entry_cases import CASES, LARGE, PARALLEL
from portable_entry_runs import KEEP, check, limits_of_kept, run_grid, run_ranks
from probing import ask
from trees import STAND_INS

from megacpp_overlays.feature_probes import hopper_flce_dispatch as feature
from megacpp_overlays.overlays.hopper_flce_dispatch import SERVED
from megacpp_overlays.source.file_trees import DirectoryTree

pytestmark = pytest.mark.gpu

OPTION = "--upstream-tree"
PORTABLE = "megacpp_overlays.kernels.linear_cross_entropy.entry"
SCALE = 16


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test here on the stand-in and the given trees that have no entry for Hopper."""
    given = {f"upstream-{path.resolve().name}": path.resolve() for path in metafunc.config.getoption(OPTION)}
    every = {**STAND_INS, **given}
    chosen = {
        name: path
        for name, path in every.items()
        if ask(feature.probe, DirectoryTree(path)).shape == feature.BLACKWELL_ONLY
    }
    metafunc.parametrize("dispatcher", list(chosen.values()), ids=list(chosen), scope="module")


@pytest.fixture(autouse=True)
def served_device() -> None:
    import torch

    major = torch.cuda.get_device_capability()[0]
    if major not in SERVED:
        pytest.skip(f"compute capability {major} is not the portable entry's")


@functools.cache
def grid(dispatcher: Path) -> dict[str, Any]:
    return run_grid(dispatcher, device="cuda:0", scale=SCALE, cases=list(CASES))


@functools.cache
def large(dispatcher: Path) -> dict[str, Any]:
    return run_grid(dispatcher, device="cuda:0", cases=list(LARGE), peak=[8192, 1024, 131072], again=True)


def test_the_dispatcher_hands_out_the_portable_entry(dispatcher: Path) -> None:
    found = grid(dispatcher)

    assert (found["decision"], found["entry"]) == ("active", PORTABLE)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_float64(dispatcher: Path, name: str) -> None:
    check(grid(dispatcher)["cases"][name], CASES[name])


@pytest.mark.parametrize("name", LARGE)
def test_they_are_at_the_size_of_a_model_too(dispatcher: Path, name: str) -> None:
    check(large(dispatcher)["cases"][name], LARGE[name])


def test_torch_that_cannot_name_the_dtype_of_a_product_gets_the_same(dispatcher: Path) -> None:
    names = ["bfloat16", "bfloat16, mean", "float16"]

    found = run_grid(dispatcher, device="cuda:0", scale=SCALE, cases=names, widen=True)["cases"]

    for name in names:
        check(found[name], CASES[name])


def test_memory_is_bounded_by_a_block_of_logits(dispatcher: Path) -> None:
    """8192 tokens and 131072 classes are 4 GiB of logits in float32. The 64 MiB above 256 are for cuBLAS."""
    assert large(dispatcher)["peak"] < 256 + 64


@functools.cache
def kept(dispatcher: Path) -> dict[str, Any]:
    names = [*(name for name, case in CASES.items() if case.split), *LARGE]
    return run_grid(dispatcher, KEEP, device="cuda:0", cases=names, again=True)


@pytest.mark.parametrize("name", [*(name for name, case in CASES.items() if case.split), *LARGE])
def test_loss_and_gradients_are_right_from_logits_that_were_kept(dispatcher: Path, name: str) -> None:
    case = {**CASES, **LARGE}[name]

    check(kept(dispatcher)["cases"][name], case, limits_of_kept(case))


def test_a_step_neither_waits_for_the_host_nor_changes_when_repeated(dispatcher: Path) -> None:
    found = large(dispatcher)["again"]

    assert found["synchronises"] == ""
    assert found["same bits"]


def test_a_compiled_call_gives_the_same_bits(dispatcher: Path) -> None:
    """Upstream's NVTX ranges break the graph around an entry."""
    assert large(dispatcher)["again"]["compiled"]


def test_a_step_replays_from_a_cuda_graph(dispatcher: Path) -> None:
    assert all(large(dispatcher)["again"]["replayed"].values())
    assert all(kept(dispatcher)["again"]["replayed"].values())


@functools.cache
def ranks(dispatcher: Path, rendezvous: Path) -> Any:
    import torch

    if torch.cuda.device_count() >= 2:
        return run_ranks(dispatcher, rendezvous, list(PARALLEL), "nccl", ["cuda:0", "cuda:1"], scale=SCALE)
    names = [name for name, case in PARALLEL.items() if not case.sequence_parallel]
    return run_ranks(dispatcher, rendezvous, names, "gloo", ["cuda:0", "cuda:0"], scale=SCALE)


@pytest.fixture(scope="module")
def rendezvous(dispatcher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks") / "rendezvous"


@pytest.mark.parametrize("name", PARALLEL)
def test_two_shards_of_a_vocabulary_are_one_vocabulary(dispatcher: Path, rendezvous: Path, name: str) -> None:
    found = ranks(dispatcher, rendezvous)
    if name not in found[0]["cases"]:
        pytest.skip("sequence parallelism needs two GPUs")

    for report in found:
        assert report["entry"] == PORTABLE
        check(report["cases"][name], PARALLEL[name])
