"""CUDA graph capture of DSA's scatter and gates, and of the packed lengths of the gated delta net, on a GPU.

Each case runs this file as a script in a fresh interpreter, because a failed capture and a device-side assertion
both leave a process unusable. A case takes upstream from a stand-in that is first on its path, or from the installed release.
"""

# ruff: noqa: T201 - a case reports on stdout

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import HANG_S, ROOT, SUPPORT
from trees import STAND_INS

pytestmark = pytest.mark.gpu

TESTS = SUPPORT
VARIANT = "megatron.core.transformer.experimental_attention_variant"
SPRING, JUNE, RELEASE = STAND_INS["dsa-spring"], STAND_INS["dsa-june"], None
"""Trees of cases; None is the installed release."""


def run_case(case: str, tree: Path | None, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = [str(each) for each in (tree, TESTS, ROOT) if each is not None]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MEGACPP_OVERLAYS_LOG": str(folder / "overlays.log"),
        **variables,
    }
    command = [sys.executable, "-W", "ignore", __file__, case]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_S, check=False)


BOTH = pytest.mark.parametrize("stand_in", [SPRING, JUNE], ids=["spring", "june"])


@BOTH
@pytest.mark.parametrize(
    "case",
    [
        "scatter_equals_the_original",
        "scatter_replays",
        "positions_replay",
        "bounds_replay",
        "foreign_mask_declines",
        "builder_compiles",
    ],
)
def test_the_case_passes(case: str, stand_in: Path, tmp_path: Path) -> None:
    completed = run_case(case, stand_in, tmp_path)
    print(completed.stdout)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert f"{case}: passed" in completed.stdout


@BOTH
@pytest.mark.parametrize("case", ["scatter_replays", "positions_replay", "bounds_replay"])
def test_without_the_overlays_the_capture_raises(case: str, stand_in: Path, tmp_path: Path) -> None:
    completed = run_case(case, stand_in, tmp_path, MEGACPP_OVERLAYS="off")
    print(completed.stdout)
    assert f"{case}: the capture raises" in completed.stdout, completed.stdout + completed.stderr


@BOTH
@pytest.mark.parametrize("case", ["scatter_out_of_range", "positions_that_begin_to_differ"])
def test_a_device_side_assertion_stops_wrong_indices_and_positions(case: str, stand_in: Path, tmp_path: Path) -> None:
    completed = run_case(case, stand_in, tmp_path)
    print(completed.stdout)
    assert f"{case}: stopped" in completed.stdout, completed.stdout + completed.stderr


@pytest.mark.upstream
@pytest.mark.parametrize("case", ["lengths_replay", "packed_lengths_replay", "gates_compile"])
def test_the_release_passes(case: str, tmp_path: Path) -> None:
    completed = run_case(case, RELEASE, tmp_path)
    print(completed.stdout)
    skip_without_target(completed)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert f"{case}: passed" in completed.stdout


@pytest.mark.upstream
@pytest.mark.parametrize("case", ["lengths_replay", "packed_lengths_replay"])
def test_without_the_overlays_the_release_cannot_be_captured(case: str, tmp_path: Path) -> None:
    completed = run_case(case, RELEASE, tmp_path, MEGACPP_OVERLAYS="off")
    print(completed.stdout)
    skip_without_target(completed)
    assert f"{case}: the capture raises" in completed.stdout, completed.stdout + completed.stderr


@pytest.mark.upstream
def test_packed_lengths_that_differ_from_the_warm_up_stop_the_replay(tmp_path: Path) -> None:
    completed = run_case("packed_lengths_that_change", RELEASE, tmp_path)
    print(completed.stdout)
    skip_without_target(completed)
    assert "packed_lengths_that_change: stopped" in completed.stdout, completed.stdout + completed.stderr


@pytest.mark.upstream
@pytest.mark.parametrize(("case", "said"), [("even", "passed"), ("uneven", "stopped")])
def test_lengths_of_two_gpus(case: str, said: str, tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    completed = run_case(f"two_ranks_{case}", RELEASE, tmp_path)
    print(completed.stdout)
    skip_without_target(completed)
    own = int(said == "passed")  # the parent process prints `passed`, too
    assert completed.stdout.count(f"two_ranks_{case}: {said}") == 2 + own, completed.stdout + completed.stderr


def skip_without_target(completed: subprocess.CompletedProcess[str]) -> None:
    if "no target" in completed.stdout:
        pytest.skip("another megatron-core is installed, or none")


# Code that runs in the process of a case


def functions() -> SimpleNamespace:
    """Return upstream's functions by names that are the same for the single file of spring and the two modules of June."""
    import importlib

    try:
        masking = importlib.import_module(f"{VARIANT}.dsa_masking")
        layout = importlib.import_module(f"{VARIANT}.dsa_layout")
        prefix = ""
    except ModuleNotFoundError:
        masking = layout = importlib.import_module(f"{VARIANT}.dsa")
        prefix = "_"
    return SimpleNamespace(
        scatter=getattr(masking, f"{prefix}scatter_topk_into_index_mask"),
        mask=getattr(masking, f"{prefix}build_dsattention_forward_mask"),
        bounds=getattr(masking, f"{prefix}build_fused_indexer_varlen_bounds"),
        positions=getattr(layout, f"{prefix}extract_query_positions_from_position_ids"),
        causal=masking.AttnMaskType.causal,
    )


def captured(case: str, work: Callable[[], Any]) -> tuple[Any, Any]:
    """Warm `work` up, capture it, and return the graph and its outputs.

    If the capture raises, print the error and end the process with exit code 3.
    """
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = work()
    except Exception as error:  # noqa: BLE001 - the error of a capture depends on the operation
        reason = error.__context__ or error
        print(f"{case}: the capture raises {type(reason).__name__}: {str(reason).splitlines()[0][:120]}", flush=True)
        os._exit(3)
    return graph, outputs


def replayed(case: str, work: Callable[[], tuple[Any, ...]], *changes: Callable[[], Any]) -> None:
    """Capture `work`, replay it after each change, and check that its outputs equal those of a call outside the graph."""
    import torch

    graph, outputs = captured(case, work)
    for number, change in enumerate(changes):
        change()
        graph.replay()
        torch.cuda.synchronize()
        for found, expected in zip(outputs, work(), strict=True):
            assert torch.equal(found, expected), f"replay {number}"
    print(f"{case}: {len(changes)} replays equal")


@contextlib.contextmanager
def stopping(case: str) -> Iterator[None]:
    """Expect an error in this block: print it and end the process with exit code 0.

    Raises:
        AssertionError: the block and the device finish without an error.
    """
    import torch

    try:
        yield
        torch.cuda.synchronize()
    except RuntimeError as error:  # torch has subclasses of it for errors of devices
        print(f"{case}: stopped: {str(error).splitlines()[0]}", flush=True)
        os._exit(0)
    raise AssertionError("nothing stopped it")


def random_indices(keys: int, lowest: int, dtype: Any) -> Any:
    import torch

    return torch.randint(lowest, keys, (2, 600, 48), dtype=dtype, device="cuda")


def scatter_equals_the_original() -> None:
    """Compare the overlay with the original outside a graph, on strided masks with infinities, NaN and both zeros."""
    import torch

    scatter = functions().scatter
    content = torch.tensor([float("-inf"), 0.0, -0.0, 1.0, 2.5, -3.0, float("inf"), float("nan")], device="cuda")
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        for lowest, kind in ((-1, torch.int32), (-90, torch.int64), (0, torch.int32)):
            mask = content[torch.randint(0, 8, (2, 600, 97), device="cuda")].to(dtype)
            indices = random_indices(97, lowest, kind)
            if lowest:
                indices[:, ::5] = -1
            expected = mask.clone()
            scatter.__wrapped__(expected, indices)
            for given in (indices, indices.cpu()):
                found = mask.repeat_interleave(2, dim=1)[:, ::2]
                scatter(found, given)
                differ = found.contiguous().view(bits) != expected.view(bits)
                # In half precision the bits of a NaN may change though it is not written.
                if dtype is not torch.float32:
                    differ &= ~(found.isnan() & expected.isnan())
                assert not bool(differ.any()), (dtype, lowest, given.device)


def scatter_replays() -> None:
    import torch

    scatter, indices = functions().scatter, random_indices(2048, -1, torch.int32)

    def work() -> tuple[Any, ...]:
        mask = torch.full((2, 600, 2048), float("-inf"), device="cuda")
        scatter(mask, indices)
        return (mask,)

    fresh = [random_indices(2048, lowest, torch.int32) for lowest in (-1, 0, -2048)]
    replayed("scatter_replays", work, *(lambda new=new: indices.copy_(new) for new in fresh), lambda: indices.fill_(-1))


def scatter_out_of_range() -> None:
    import torch

    scatter, indices = functions().scatter, random_indices(64, -1, torch.int32)
    indices[0, 0, 0] = 64
    with stopping("scatter_out_of_range"):
        scatter(torch.zeros(2, 600, 64, device="cuda"), indices)


def positions_replay() -> None:
    import torch

    extract, ids = functions().positions, torch.arange(64, device="cuda").repeat(3, 1)
    replayed("positions_replay", lambda: (extract(ids, 64, ids.device) + 0,), lambda: ids.add_(7), lambda: ids.mul_(2))
    one_row = torch.arange(64, device="cuda")[None].expand(3, 64)
    replayed("positions_replay", lambda: (extract(one_row, 64, ids.device) + 0,), lambda: None)


def positions_that_begin_to_differ() -> None:
    import torch

    extract, ids = functions().positions, torch.arange(64, device="cuda").repeat(2, 1)
    graph, _ = captured("positions_that_begin_to_differ", lambda: extract(ids, 64, ids.device) + 0)
    graph.replay()
    torch.cuda.synchronize()
    ids[1, 5] = 0
    with stopping("positions_that_begin_to_differ"):
        graph.replay()


def built(found: SimpleNamespace, **changes: Any) -> dict[str, Any]:
    """Build a mask for 64 queries, and return the arguments of `bounds` for it.

    Args:
        found: the result of `functions`.
        changes: arguments of the builder that replace the defaults.
    """
    import torch

    device = torch.device("cuda", 0)
    given = {
        "sq": 64,
        "skv": 64,
        "b": 2,
        "device": device,
        "cp_size": 1,
        "cp_rank": 0,
        "cp_comm_type": "allgather",
        "cp_group": None,
        "attn_mask_type": found.causal,
        "attention_mask": None,
        "position_ids": None,
        "packed_seq_params": None,
        **changes,
    }
    mask, varlen = found.mask(**given)
    ranges = dict(zip(("varlen_starts", "varlen_ends", "key_positions"), varlen or (None,) * 3, strict=True))
    return {"sq": 64, "skv": given["skv"], "device": device, "mask": mask, **ranges}


def bounds_replay() -> None:
    import torch

    found = functions()
    lengths = torch.tensor([0, 24, 64], dtype=torch.int32, device="cuda")
    none = {"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **none)
    replayed("bounds_replay", lambda: found.bounds(**built(found)), lambda: None)
    ids = torch.arange(32, 96, device="cuda").repeat(2, 1)
    ranks = {"skv": 128, "cp_size": 2, "position_ids": ids}
    replayed("bounds_replay", lambda: found.bounds(**built(found, **ranks)), lambda: ids.sub_(32))

    def work() -> tuple[Any, ...]:
        return found.bounds(**built(found, packed_seq_params=packed))  # type: ignore[no-any-return]

    replayed("bounds_replay", work, lambda: lengths.copy_(torch.tensor([0, 8, 64])))


def foreign_mask_declines() -> None:
    import torch

    found = functions()
    hidden = torch.ones(64, 64, dtype=torch.bool, device="cuda").triu(1).expand(2, 1, 64, 64)
    outside = built(found, attn_mask_type=None, attention_mask=hidden)
    assert found.bounds(**outside) is not None
    answers: list[Any] = []

    def work() -> Any:
        answers.append(found.bounds(**built(found, attn_mask_type=None, attention_mask=hidden)))
        return hidden.sum()

    captured("foreign_mask_declines", work)
    assert answers[0] is not None, "outside a capture upstream looks at the mask"
    assert answers[-1] is None, "inside one it cannot"


def builder_compiles() -> None:
    """Compile the builder, the bounds and the positions on CUDA as one graph."""
    import torch

    found = functions()
    none = dict.fromkeys(("mask", "varlen_starts", "varlen_ends", "key_positions"))

    def step(ids: Any) -> Any:
        given = built(found)
        bounds = found.bounds(**{**given, **none})
        return given["mask"].exp(), found.positions(ids, 64, ids.device), *bounds

    ids = torch.arange(64, device="cuda")[None]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(ids)
    assert all(torch.equal(one, other) for one, other in zip(compiled, step(ids), strict=True))


def target(module: str, name: str) -> Any:
    """Return an attribute of a module of the release. If there is none, print `no target` and end the process."""
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError):
        print("no target")
        sys.exit(0)


def group(backend: str, folder: str, rank: int = 0, world_size: int = 1) -> Any:
    import torch

    torch.cuda.set_device(rank)
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group(backend, init_method=meet, rank=rank, world_size=world_size)
    return torch.distributed.group.WORLD


def lengths_replay() -> None:
    import torch

    validate = target(f"{VARIANT}.dsa", "_validate_nonpacked_cp_uniform_length")
    world, device = group("nccl", tempfile.mkdtemp()), torch.device("cuda", 0)
    counter = torch.zeros(1, device=device)

    def work() -> tuple[Any, ...]:
        validate(sq=64, skv=64, cp_size=1, cp_group=world, device=device)
        return (counter + 1,)

    replayed("lengths_replay", work, lambda: counter.add_(1), lambda: None)
    done("lengths_replay")


def packed_lengths_replay() -> None:
    import torch

    resolve = packed_resolver()
    lengths = torch.tensor([0, 24, 64], dtype=torch.int32, device="cuda")

    def work() -> tuple[Any, ...]:
        queries, keys = (resolve(None, None, lengths, 64, name) for name in ("cu_seqlens_q", "cu_seqlens_kv"))
        assert torch.equal(queries, keys), "as the forward pass asks"
        return (queries + 0,)

    replayed("packed_lengths_replay", work, lambda: None, lambda: lengths.copy_(lengths.clone()))


def packed_lengths_that_change() -> None:
    import torch

    resolve = packed_resolver()
    lengths = torch.tensor([0, 24, 64], dtype=torch.int32, device="cuda")

    def work() -> Any:
        return [resolve(None, None, lengths, 64, name) for name in ("cu_seqlens_q", "cu_seqlens_kv")]

    graph, _ = captured("packed_lengths_that_change", work)
    graph.replay()
    torch.cuda.synchronize()
    lengths[1] = 32
    with stopping("packed_lengths_that_change"):
        graph.replay()


def packed_resolver() -> Any:
    """Return `_resolve_cu_seqlens` of the gated delta net. If there is none, print `no target` and end the process."""
    import importlib

    for module, name in (
        ("megatron.core.ssm.gated_delta_net.common", "_GDNBase"),
        ("megatron.core.ssm.gated_delta_net", "GatedDeltaNet"),
    ):
        with contextlib.suppress(ModuleNotFoundError):
            if hasattr(owner := getattr(importlib.import_module(module), name, None), "_resolve_cu_seqlens"):
                return owner._resolve_cu_seqlens
    print("no target")
    return sys.exit(0)


def gates_compile() -> None:
    """Compile the length check without a group on CUDA as one graph, as upstream's check compiles."""
    import torch

    validate = target(f"{VARIANT}.dsa", "_validate_nonpacked_cp_uniform_length")

    def step(x: Any) -> Any:
        validate(sq=4, skv=8, cp_size=2, cp_group=None, device=x.device)
        return x + 1

    ones = torch.ones(4, device="cuda")
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(ones), ones + 1)


def done(case: str) -> None:
    """Print that a case passed, and end the process without a shutdown of NCCL, which may wait for a graph."""
    print(f"{case}: passed", flush=True)
    os._exit(0)


def two_ranks(case: str, uneven: int) -> None:
    import torch

    target(f"{VARIANT}.dsa", "_validate_nonpacked_cp_uniform_length")
    arguments = (case, uneven, tempfile.mkdtemp())
    # Each process is joined alone: if one rank fails, `context.join()` ends the other before it reports.
    context = torch.multiprocessing.start_processes(_rank, args=arguments, nprocs=2, start_method="spawn", join=False)
    for process in context.processes:
        process.join()


def _rank(rank: int, case: str, uneven: int, folder: str) -> None:
    import torch

    import megacpp_overlays  # noqa: F401 - a spawned process arms overlays itself

    validate = target(f"{VARIANT}.dsa", "_validate_nonpacked_cp_uniform_length")
    world, device = group("nccl", folder, rank, 2), torch.device("cuda", rank)
    sq = [64]

    def work() -> Any:
        validate(sq=sq[0], skv=sq[0], cp_size=2, cp_group=world, device=device)
        return torch.ones(1, device=device)

    for _ in range(2):
        work()
    sq[0] += rank * uneven
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    if uneven:
        with stopping(case):
            graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    done(case)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        *(scatter_equals_the_original, scatter_replays, scatter_out_of_range),
        *(positions_replay, positions_that_begin_to_differ, bounds_replay, foreign_mask_declines, builder_compiles),
        *(lengths_replay, packed_lengths_replay, packed_lengths_that_change, gates_compile),
    )
}
CASES |= {
    "two_ranks_even": lambda: two_ranks("two_ranks_even", 0),
    "two_ranks_uneven": lambda: two_ranks("two_ranks_uneven", 1),
}


if __name__ == "__main__":
    import megacpp_overlays  # noqa: F401 - first, as in a launcher

    CASES[sys.argv[1]]()
    print(f"{sys.argv[1]}: passed")
