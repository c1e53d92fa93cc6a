"""Packs 47 and 02 on a GPU: absorbed DSA attention of the installed Megatron with the seams and without.

With `-s` the numbers behind the bounds are printed.
"""

# ruff: noqa: T201 - prints measurements

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from dsa_source import install, module_of

from megacpp_overlays.feature_probes import dsa_sparse_attention as feature
from megacpp_overlays.feature_probes import sparse_mla_dimensions
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.dsa_sparse_attention import OVERLAY
from megacpp_overlays.overlays.sparse_mla_dimensions import OVERLAY as DIMENSIONS
from megacpp_overlays.source.trees import InstalledTree, answer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.upstream,
    pytest.mark.filterwarnings("ignore"),  # Triton and inductor warn as they like
]

DEVICE = "cuda"
TRAINED = (4096, 4096, 128, 576, 512, 2048)
"""Queries, keys, heads, channels of keys and of values, and top-k of a layer of DeepSeek V3.2."""
FEW = (256, 4096, 128, 576, 512, 2048)
"""Few enough queries for upstream's way in float32."""
SMALL = (64, 96, 16, 192, 128, 24)
MASKS = ("bounds", "positions", "a mask", "causal")


def attentions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function of the installed Megatron, without the seam and with it."""
    tree, found = InstalledTree(), []
    if answer(feature.probe, tree).verdict is not Verdict.BROKEN:
        pytest.skip("no absorbed attention of a known form is installed")
    for seams in (False, True):
        module = module_of(tree, feature.TARGET.module, feature.FUNCTION)
        vars(module)["dsa_masking"] = module_of(tree, feature.MASKING)
        if seams:
            install(OVERLAY, feature.ALL_KEYS, module)
        found.append(getattr(module, feature.FUNCTION))
    return found[0], found[1]


@pytest.fixture(scope="module")
def upstream() -> Callable[..., Any]:
    return attentions()[0]


@pytest.fixture(scope="module")
def patched() -> Callable[..., Any]:
    return attentions()[1]


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[list[Any], Any, Any]:
    """Return query and key as leaves, the chosen keys of each query, and a gradient of the output."""
    rows, keys, heads, dim, value, slots = sizes
    generator = torch.Generator(DEVICE).manual_seed(1)
    shapes = ((rows, 1, heads, dim), (keys, 1, 1, dim), (rows, 1, heads, value))
    query, key, above = (torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for shape in shapes)
    chosen = torch.rand((1, rows, keys), generator=generator, device=DEVICE).topk(slots, dim=-1).indices
    chosen[torch.rand(chosen.shape, generator=generator, device=DEVICE) < 0.1] = -1
    return [query.to(dtype).requires_grad_(), key.to(dtype).requires_grad_()], chosen, above.to(dtype)


def masks(kind: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    rows, keys = sizes[:2]
    ends = torch.arange(rows, device=DEVICE) + 1 + keys - rows
    if kind == "causal":
        return {}
    if kind == "a mask":
        return {
            "mask": torch.zeros(rows, keys, device=DEVICE).masked_fill_(
                torch.arange(keys, device=DEVICE) >= ends[:, None], -torch.inf
            )
        }
    positions = {"key_positions": torch.arange(keys, device=DEVICE).flip(0)} if kind == "positions" else {}
    return {"varlen_starts": torch.zeros_like(ends), "varlen_ends": ends, **positions}


def stepped(
    attention: Callable[..., Any], sizes: tuple[int, ...], kind: str, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Return a step, forward and backward."""
    leaves, chosen, above = inputs(sizes, dtype)
    given = masks(kind, sizes)

    def step() -> tuple[Any, ...]:
        output = attention(*leaves, chosen, sizes[3] ** -0.5, sizes[4], **given)
        return output.detach(), *torch.autograd.grad(output, leaves, above)

    return step


def errors(found: tuple[Any, ...], true: tuple[Any, ...]) -> list[float]:
    return [
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(found, true, strict=True)
    ]


# Values


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", [FEW, SMALL], ids=["576 of 512", "192 of 128"])
def test_values_and_gradients_are_as_near_to_float32_as_upstreams(
    sizes: tuple[int, ...], kind: str, upstream: Any, patched: Any
) -> None:
    true = stepped(upstream, sizes, kind, torch.float32)()
    theirs = errors(stepped(upstream, sizes, kind)(), true)
    ours = errors(stepped(patched, sizes, kind)(), true)

    print(f"relative errors of output, query and key: upstream {theirs}, ours {ours}")
    for mine, their in zip(ours, theirs, strict=True):
        assert mine <= max(1.1 * their, 6e-3)


# Memory and waiting


def peak_of(work: Callable[[], Any]) -> int:
    """Return the bytes that `work` held at once, its results included."""
    work()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_a_step_holds_less_than_one_tensor_of_all_scores(patched: Any) -> None:
    rows, keys, heads, dim, value, _ = TRAINED
    all_scores = 4 * rows * heads * keys
    results = 2 * (rows * heads * (dim + value) + keys * dim)

    peak = peak_of(stepped(patched, TRAINED, "bounds"))

    print(f"{peak / 2**20:.0f} MiB, of them {results / 2**20:.0f} results; all scores are {all_scores / 2**20:.0f}")
    assert peak < all_scores


def test_upstream_holds_several(upstream: Any) -> None:
    all_scores = 4 * TRAINED[0] * TRAINED[1] * TRAINED[2]
    if torch.cuda.mem_get_info()[0] < 7.5 * all_scores:
        pytest.skip("needs 60 GiB of free device memory")

    peak = peak_of(stepped(upstream, TRAINED, "bounds"))

    print(f"{peak / 2**20:.0f} MiB")
    assert peak >= 3 * all_scores


@pytest.mark.parametrize("kind", MASKS)
def test_a_step_never_waits_for_the_device(kind: str, patched: Any) -> None:
    step = stepped(patched, SMALL, kind)
    step()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("kind", MASKS)
def test_a_captured_step_replays(kind: str, patched: Any) -> None:
    step = stepped(patched, SMALL, kind)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for each in captured:
        each.zero_()

    graph.replay()
    torch.cuda.synchronize()

    assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))


# Where the TileLang backend declines


def backend() -> ModuleType:
    tree = InstalledTree()
    if answer(sparse_mla_dimensions.probe, tree).verdict is not Verdict.BROKEN:
        pytest.skip("no TileLang backend of a known form is installed")
    module = module_of(tree, sparse_mla_dimensions.TARGET.module)
    vars(module)["SparseMLA"] = None
    return module


@pytest.mark.parametrize(
    "sizes",
    [
        (512, 1024, 64, 320, 256, 256),
        (512, 1024, 16, 192, 128, 256),
        (512, 1024, 48, 576, 512, 256),
        (512, 1024, 16, 576, 512, 100),
    ],
    ids=["320 of 256", "192 of 128", "48 heads", "a top-k of 100"],
)
def test_what_the_backend_declines_is_served(sizes: tuple[int, ...], upstream: Any) -> None:
    module = backend()
    asked = sizes_asked(module, sizes)
    assert asked() is None
    install(DIMENSIONS, sparse_mla_dimensions.ONE_KERNEL, module)
    leaves, chosen, above = inputs(sizes)
    everything = {
        "varlen_starts": torch.zeros(sizes[0], dtype=torch.int64, device=DEVICE),
        "varlen_ends": torch.full((sizes[0],), sizes[1], device=DEVICE),
    }

    found = sizes_asked(module, sizes, leaves, chosen)()

    expected = upstream(*leaves, chosen, sizes[3] ** -0.5, sizes[4], **everything)
    ours, theirs = ((each.detach(), *torch.autograd.grad(each, leaves, above)) for each in (found, expected))
    assert max(errors(ours, theirs)) <= 1e-2


def sizes_asked(
    module: ModuleType, sizes: tuple[int, ...], leaves: Any = None, chosen: Any = None
) -> Callable[[], Any]:
    """Return a call of the backend."""
    if leaves is None:
        leaves, chosen, _ = inputs(sizes)
    function = getattr(module, sparse_mla_dimensions.FUNCTION)
    return lambda: function(*leaves, chosen, sizes[3] ** -0.5, sizes[4])
