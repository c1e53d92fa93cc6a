"""Absorbed attention that the TileLang backend declines, with the seam and without it, each with the seam of pack 03 and without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from absorbed_attention import attention_of, numbers
from dsa_source import install, module_of
from fp8_dispatch import Kernel, kernel_in, quantized
from fp8_dispatch import inputs as of_the_kernel
from releases import daily, newest

from megacpp_overlays import fp8_sparse_mla
from megacpp_overlays.feature_probes import dsa_sparse_attention, fp8_quantized_unwrap
from megacpp_overlays.feature_probes import sparse_mla_dimensions as feature
from megacpp_overlays.kernels.sparse_attention import function as sparse_attention
from megacpp_overlays.overlays import fp8_quantized_unwrap as fp8
from megacpp_overlays.overlays.sparse_mla_dimensions import OVERLAY
from megacpp_overlays.source.file_trees import ArchiveTree

VERSIONS = ("0.19.0", "0.19.1", newest())
ROWS, BATCH, KEYS, SCALE = 5, 2, 9, 0.3
BF16 = torch.bfloat16
Wheel = Callable[[str, str], Path]

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("small_calls")]


def backend_of(wheel: Path) -> ModuleType:
    """Return the functions of a release's backend, without TileLang."""
    module = module_of(ArchiveTree(wheel), feature.TARGET.module)
    vars(module)["SparseMLA"] = None
    return module


@pytest.fixture(params=daily(*VERSIONS))
def file(request: pytest.FixtureRequest, wheel: Wheel) -> Path:
    return wheel("megatron-core", request.param)


@pytest.fixture
def upstream(file: Path) -> ModuleType:
    return backend_of(file)


@pytest.fixture
def patched(file: Path) -> ModuleType:
    module = backend_of(file)
    install(OVERLAY, feature.ONE_KERNEL, module)
    return module


def inputs(heads: int, dim: int, dtype: torch.dtype = BF16, keys: int = KEYS) -> list[Any]:
    """Return query and key as leaves that want gradients."""
    made = numbers(ROWS, BATCH, heads, dim, dtype=dtype), numbers(keys, BATCH, 1, dim, seed=1, dtype=dtype)
    return [each.requires_grad_() for each in made]


def choices(slots: int, keys: int = KEYS) -> Any:
    """Return the choices that an indexer gives a backend: keys up to the place of a query, -1 for the rest."""
    generator = torch.Generator().manual_seed(2)
    chosen = torch.rand((BATCH, ROWS, keys), generator=generator).topk(min(slots, keys)).indices
    chosen = torch.nn.functional.pad(chosen, (0, slots - chosen.size(-1)), value=-1)
    return chosen.masked_fill(chosen > torch.arange(ROWS)[:, None] + 2, -1).int()


def call(module: ModuleType, query: Any, key: Any, chosen: Any, channels: int) -> Any:
    return getattr(module, feature.FUNCTION)(query, key, chosen, SCALE, channels)


def away(found: Any, expected: Any) -> float:
    assert found.shape == expected.shape
    assert found.isfinite().all()
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


DIMENSIONS = {
    "320 and 256 channels": (4, 320, 256, 8),
    "192 and 128 channels": (16, 192, 128, 64),
    "576 channels, all of them values": (2, 576, 576, 64),
    "48 heads": (48, 576, 512, 64),
    "24 heads and other channels": (24, 40, 24, 7),
    "a top-k of 100": (16, 576, 512, 100),
}


# Calls that upstream's backend declines


@pytest.mark.parametrize(("heads", "dim", "channels", "slots"), DIMENSIONS.values(), ids=DIMENSIONS)
@pytest.mark.parametrize("kernel", [None, Kernel()], ids=["without TileLang", "with it"])
def test_other_dimensions_are_declined_upstream_and_served_here(
    heads: int, dim: int, channels: int, slots: int, kernel: Any, upstream: ModuleType, patched: ModuleType, file: Path
) -> None:
    query, key = inputs(heads, dim)
    chosen = choices(slots)
    with kernel_in(upstream, kernel), kernel_in(patched, kernel):
        assert call(upstream, query, key, chosen, channels) is None
        found = call(patched, query, key, chosen, channels)
    above = numbers(*found.shape, seed=9, dtype=BF16)
    gradients = torch.autograd.grad(found, [query, key], above)

    unfused = getattr(attention_of(file), dsa_sparse_attention.FUNCTION)
    everything = {"varlen_starts": torch.zeros(ROWS).long(), "varlen_ends": torch.full((ROWS,), KEYS)}
    expected = unfused(query, key, chosen, SCALE, channels, **everything)
    theirs = torch.autograd.grad(expected, [query, key], above)

    assert found.dtype == BF16
    assert found.is_contiguous()
    assert away(found, expected) <= 1e-2
    assert max(map(away, gradients, theirs)) <= 1e-2
    assert kernel is None or not kernel.got


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_float16_and_any_integers_are_served(dtype: torch.dtype, patched: ModuleType) -> None:
    wide, narrow = (inputs(4, 48, kind) for kind in (torch.float32, torch.float16))
    chosen = choices(6)
    expected, _ = sparse_attention.attend(*wide, chosen, SCALE, 32)

    assert away(call(patched, *narrow, chosen.to(dtype), 32), expected) <= 2e-3


def test_without_tilelang_the_kernels_own_dimensions_are_served_as_well(
    upstream: ModuleType, patched: ModuleType
) -> None:
    query, key, chosen = of_the_kernel()

    assert call(upstream, query, key, chosen, 512) is None
    assert call(patched, query, key, chosen, 512).shape == (*query.shape[:3], 512)


def test_calls_that_the_kernel_takes_stay_the_kernels(patched: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("ours was asked")

    monkeypatch.setattr(sparse_attention, "attend", fails)
    query, key, chosen = of_the_kernel()
    with kernel_in(patched, Kernel()) as kernel:
        found = call(patched, query, key, chosen, 512)
        assert torch.equal(found, getattr(patched, feature.DISPATCHER)(query, key, chosen, SCALE, 512))
    assert len(kernel.got) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"query": numbers(ROWS, BATCH, 4, 48)},
        {"key": numbers(KEYS, BATCH, 1, 48)},
        {"key": numbers(KEYS, BATCH, 2, 48, dtype=BF16)},
        {"key": numbers(KEYS, BATCH, 1, 40, dtype=BF16)},
        {"key": numbers(KEYS, BATCH, 48, dtype=BF16)},
        {"key": numbers(0, BATCH, 1, 48, dtype=BF16)},
        {"query": numbers(ROWS, BATCH + 1, 4, 48, dtype=BF16)},
        {"topk_indices": choices(6)[:, 1:]},
        {"topk_indices": choices(6).float()},
        {"v_channels": 49},
        {"v_channels": 0},
        {"softmax_scale": torch.tensor(SCALE)},
        {"query": quantized(numbers(ROWS, BATCH, 4, 48)), "key": quantized(numbers(KEYS, BATCH, 1, 48))},
    ],
)
def test_everything_else_is_declined_as_before(changed: dict[str, Any], patched: ModuleType) -> None:
    query, key = inputs(4, 48)
    given = {"query": query, "key": key, "topk_indices": choices(6), "softmax_scale": SCALE, "v_channels": 32}
    assert getattr(patched, feature.FUNCTION)(**given) is not None

    assert getattr(patched, feature.FUNCTION)(**{**given, **changed}) is None


# Together with pack 03, which replaces the dispatcher

RELEASE = next(part for part in fp8.PARTS if part.target.module == feature.TARGET.module)
SEAMS = {"03": (RELEASE, fp8_quantized_unwrap.GUARD_FOOLED), "02": (OVERLAY, feature.ONE_KERNEL)}
ORDERS = [order for count in range(3) for order in itertools.permutations(SEAMS, count)]


@pytest.fixture(params=ORDERS, ids=lambda order: " then ".join(order) or "neither")
def together(request: pytest.FixtureRequest, file: Path) -> Iterator[tuple[ModuleType, set[str]]]:
    """A backend with the seams of one, both or neither, in either order."""
    module = backend_of(file)
    before = dict(vars(module))
    undo = [install(*SEAMS[name], module) for name in request.param]
    yield module, set(request.param)
    for each in undo:  # also in the order in which they went in
        each()
    assert dict(vars(module)) == before


def test_each_seam_does_its_part_with_and_without_the_other(together: tuple[ModuleType, set[str]]) -> None:
    module, active = together
    query, key, chosen = of_the_kernel()
    pair = quantized(query), quantized(key)
    asked: list[Any] = []
    with kernel_in(module, Kernel()) as kernel:
        assert call(module, query, key, chosen, 512) is not None
        assert call(module, *pair, chosen, 512) is not None
        opened = [each.opened for each in pair]
        forget = fp8_sparse_mla.register(lambda *given: asked.append(given) or query[..., :512])
        try:
            call(module, *pair, chosen, 512)
        finally:
            forget()
        served = call(module, *inputs(4, 48), choices(6), 32)
        tested = {name: not SEAMS[name][0].self_test(module).broken for name in active}

    assert opened == ([1, 1] if "03" in active else [0, 0])
    assert len(asked) == ("03" in active)
    assert asked == [] or asked[0][:2] == pair
    assert (served is not None) == ("02" in active)
    assert len(kernel.got) == 3 - len(asked)
    assert tested == dict.fromkeys(active, True)


def test_a_call_that_both_decline_is_declined_to_the_caller(together: tuple[ModuleType, set[str]]) -> None:
    module, active = together
    pair = [quantized(each) for each in inputs(4, 48)]
    with kernel_in(module, Kernel()) as kernel:
        assert call(module, *pair, choices(6), 32) is None
    assert kernel.got == []
    assert [each.opened for each in pair] == ([1, 1] if "03" in active else [0, 0])


# Before installing, and after


@pytest.mark.parametrize("kernel", [None, Kernel()], ids=["without TileLang", "with it"])
def test_witness_and_self_test_need_no_kernel(kernel: Any, upstream: ModuleType, patched: ModuleType) -> None:
    with kernel_in(upstream, kernel), kernel_in(patched, kernel):
        seen = OVERLAY.witness(upstream)  # type: ignore[misc]
        assert seen.broken
        assert "declined" in seen.seen
        assert not OVERLAY.self_test(patched).broken
    assert kernel is None or not kernel.got


@pytest.mark.parametrize(
    "wrong",
    [lambda found: 1.1 * found, lambda found: found[..., 1:], lambda found: found.flip(0)],
    ids=["another scale", "another shape", "other rows"],
)
def test_the_self_test_notices_a_wrong_seam(wrong: Any, patched: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = sparse_attention.attend
    monkeypatch.setattr(sparse_attention, "attend", lambda *args, **named: (wrong(attend(*args, **named)[0]), None))

    assert OVERLAY.self_test(patched).broken


def test_it_works_in_any_state_of_the_importing_thread(patched: ModuleType) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert not OVERLAY.self_test(patched).broken
    finally:
        torch.set_default_dtype(torch.float32)
