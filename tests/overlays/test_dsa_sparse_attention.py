"""Absorbed DSA attention, with the seam and without: the same values and gradients, and no scores of all keys."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import released_megatron
import torch
from absorbed_attention import (
    ALL_SCORES,
    BATCH,
    DIM,
    HEADS,
    KEYS,
    MASKS,
    ROWS,
    SCALE,
    SLOTS,
    VALUE,
    MostElements,
    attention_of,
    called,
    choices,
    inputs,
    numbers,
)
from dsa_source import install
from fp8_dispatch import quantized
from hypothesis import given, settings
from hypothesis import strategies as st
from places import SUPPORT
from releases import daily, newest, weekly

from megacpp_overlays import variables
from megacpp_overlays.feature_probes import dsa_sparse_attention as feature
from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.sparse_attention import function as sparse_attention
from megacpp_overlays.overlays.dsa_sparse_attention import OVERLAY

VERSIONS = ("0.19.0", "0.19.1", newest())
DAILY = daily(*VERSIONS)
Wheel = Callable[[str, str], Path]


class Pairs(dict[str, tuple[ModuleType, ModuleType]]):
    """For each version, the module without the seam and with it, made on demand."""

    wheel: Wheel

    def __missing__(self, version: str) -> tuple[ModuleType, ModuleType]:
        file = self.wheel("megatron-core", version)
        self[version] = attention_of(file), attention_of(file)
        install(OVERLAY, feature.ALL_KEYS, self[version][1])
        return self[version]


PAIRS = Pairs()

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("small_calls")]


@pytest.fixture(autouse=True, scope="module")
def pairs(wheel: Wheel) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    PAIRS.wheel = wheel
    yield
    PAIRS.clear()
    torch.set_num_threads(threads)


@pytest.fixture(params=DAILY)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def upstream() -> ModuleType:
    return PAIRS[newest()][0]


@pytest.fixture
def patched() -> ModuleType:
    return PAIRS[newest()][1]


def away(found: Any, expected: Any) -> float:
    """Return the Euclidean distance of two tensors, relative to the norm."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.isfinite().all()
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


# Sizes that are served


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_a_small_call_is_upstreams_own_where_no_kernel_was_measured(masks: dict[str, Any]) -> None:
    upstream, patched = PAIRS[newest()]
    expected, gradients = called(upstream, inputs(torch.bfloat16), choices(), **masks)

    with mock.patch.object(measured, "_calls_of_every_size", 0):
        found, ours = called(patched, inputs(torch.bfloat16), choices(), **masks)

    assert torch.equal(found, expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, gradients, strict=True))


@pytest.mark.parametrize("more", [0, 1])
def test_a_call_is_served_where_upstreams_scores_are_large(
    more: int, patched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = inputs(torch.float32)
    monkeypatch.setattr(measured, "_calls_of_every_size", 0)
    monkeypatch.setattr(measured, "SMALL", 4 * ALL_SCORES - more)

    with mock.patch.object(sparse_attention, "attend", wraps=sparse_attention.attend) as ours:
        called(patched, leaves, choices())

    assert ours.call_count == more


# The same, to rounding


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values_and_gradients_are_upstreams(version: str, dtype: torch.dtype, masks: dict[str, Any]) -> None:
    upstream, patched = PAIRS[version]
    expected, gradients = called(upstream, inputs(dtype), choices(), **masks)

    found, ours = called(patched, inputs(dtype), choices(), **masks)

    assert found.is_contiguous()
    assert away(found, expected) <= TOLERANCES[dtype]
    for mine, theirs in zip(ours, gradients, strict=True):
        assert away(mine, theirs) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_about_as_near_to_the_truth_as_upstreams(dtype: torch.dtype) -> None:
    """For flat and peaked softmax: with larger queries fewer keys share a row, and gradients of scores are smaller differences."""
    upstream, patched = PAIRS[newest()]
    for seed, sharpness in itertools.product(range(3), (1, 4, 16, 64)):
        leaves = inputs(dtype, seed=seed)
        with torch.no_grad():
            leaves[0].mul_(sharpness)
        truth, of_truth = called(upstream, [each.detach().float().requires_grad_() for each in leaves], choices())

        errors = []
        for module in (upstream, patched):
            output, gradients = called(module, leaves, choices())
            pairs = zip([output, *gradients], [truth, *of_truth], strict=True)
            errors.append([away(found.float(), true) for found, true in pairs])

        for their, mine in zip(*errors, strict=True):
            assert mine <= 1.1 * their


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 12),
    keys=st.integers(1, 14),
    slots=st.integers(1, 14),
    kind=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_results_of_any_shape_are_upstreams(rows: int, keys: int, slots: int, kind: int, seed: int) -> None:
    upstream, patched = PAIRS[newest()]
    chosen = choices(rows, keys, min(slots, keys), seed)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, keys, (rows,), generator=generator)
    masks: dict[str, Any] = [
        {},
        {
            "varlen_starts": starts,
            "varlen_ends": starts + 3,
            "key_positions": torch.randperm(keys, generator=generator),
        },
        {"mask": torch.where(torch.rand((rows, keys), generator=generator) < 0.5, -torch.inf, 0.25)},
    ][kind]
    leaves = inputs(rows=rows, keys=keys, seed=seed)

    expected, found = (called(module, leaves, chosen, **masks) for module in (upstream, patched))

    for mine, theirs in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_query_without_a_key_has_0_and_no_gradient(upstream: ModuleType, patched: ModuleType) -> None:
    chosen = torch.full((BATCH, ROWS, SLOTS), -1)

    for module in (upstream, patched):
        output, gradients = called(module, inputs(), chosen)
        assert not any(each.count_nonzero() for each in (output, *gradients))
    assert called(patched, inputs(), choices())[0][ROWS // 2, 0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_indices_may_be_any_integers(dtype: torch.dtype, upstream: ModuleType, patched: ModuleType) -> None:
    chosen = choices()

    found, _ = called(patched, inputs(), chosen.to(dtype))

    assert away(found, called(upstream, inputs(), chosen)[0]) <= TOLERANCES[torch.float32]
    assert torch.equal(chosen, choices())  # which a layer shares with others


def test_inputs_may_be_strided_and_given_by_name(upstream: ModuleType, patched: ModuleType) -> None:
    query, key = (each.detach().repeat_interleave(2, 1)[:, ::2] for each in inputs())
    assert not query.is_contiguous()
    given = {"query": query, "key": key, "topk_indices": choices(), "softmax_scale": SCALE, "v_channels": VALUE}

    found, expected = (getattr(module, feature.FUNCTION)(**given) for module in (patched, upstream))

    assert away(found, expected) <= TOLERANCES[torch.float32]
    assert inspect.signature(getattr(patched, feature.FUNCTION)) == inspect.signature(
        getattr(upstream, feature.FUNCTION)
    )


# Differences from upstream that the notes name


def test_a_key_that_is_chosen_twice_counts_twice_and_once_upstream(upstream: ModuleType, patched: ModuleType) -> None:
    masks = {"varlen_starts": torch.zeros(ROWS), "varlen_ends": torch.full((ROWS,), KEYS)}
    masks = {name: each.long() for name, each in masks.items()}
    twice = torch.tensor([4, 4, 7]).expand(BATCH, ROWS, 3)
    query, key = inputs()

    theirs, ours = (called(module, [query, key], twice, **masks)[0] for module in (upstream, patched))

    assert away(theirs, called(upstream, [query, key], twice[..., 1:], **masks)[0]) <= 1e-6
    scores = torch.einsum("sbhd,tbd->sbht", query, key[:, :, 0])[..., [4, 7]] * SCALE
    shares = torch.softmax(scores + torch.tensor([2.0, 1.0]).log(), dim=-1)
    expected = torch.einsum("sbht,tbv->sbhv", shares, key[[4, 7], :, 0, :VALUE])
    assert away(ours, expected.detach()) <= 1e-6


def test_an_index_that_is_no_key_is_no_choice_and_an_error_upstream(upstream: ModuleType, patched: ModuleType) -> None:
    chosen = choices()
    beyond = chosen.masked_fill(chosen == -1, KEYS + 3)

    with pytest.raises(RuntimeError, match="out of bounds"):
        called(upstream, inputs(), beyond)
    assert torch.equal(called(patched, inputs(), beyond)[0], called(patched, inputs(), chosen)[0])


def test_a_choice_of_no_key_is_an_error_where_choices_are_checked(
    patched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(variables._of_this_process, variables.SPARSE_ATTENTION_CHOICES.name, "check")
    chosen = choices()
    called(patched, inputs(torch.float32), chosen)
    chosen[1, 2, 0] = KEYS

    with pytest.raises(
        ValueError, match=f"batch element 1, query 2: index {KEYS} is neither -1 nor one of {KEYS} keys"
    ):
        called(patched, inputs(torch.float32), chosen)


def test_nan_stays_in_a_key_that_no_query_chose(upstream: ModuleType, patched: ModuleType) -> None:
    query, key = inputs()
    chosen = choices()
    chosen[chosen == 2] = -1
    with torch.no_grad():
        key[2] = torch.nan

    assert called(upstream, [query, key], chosen)[0].isnan().any()
    assert called(patched, [query, key], chosen)[0].isfinite().all()


# Calls that go to upstream's function


def test_calls_that_megatron_never_makes_go_to_upstream(
    upstream: ModuleType, patched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(sparse_attention, "attend", fails)
    query, key = (each.detach() for each in inputs())
    bounds = {"varlen_starts": torch.zeros(1, dtype=torch.int64), "varlen_ends": torch.full((1,), KEYS)}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((query, key.double(), choices(), SCALE, VALUE), {}),
        ((query.double(), key.double(), choices(), SCALE, VALUE), {}),
        ((query, key.bfloat16(), choices(), SCALE, VALUE), {}),
        ((query, key, choices(), torch.tensor(SCALE), VALUE), {}),
        ((query, key, choices(), SCALE, VALUE), bounds),
        ((query, key, choices()[..., :0], SCALE, 0), {}),
    ]
    for positional, named in calls:
        found, expected = (getattr(module, feature.FUNCTION)(*positional, **named) for module in (patched, upstream))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changed", "raised"),
    [
        ({"key": numbers(KEYS, BATCH, 2, DIM)}, AssertionError),
        ({"v_channels": DIM + 1}, AssertionError),
        ({"topk_indices": choices()[:, 1:]}, AssertionError),
        ({"mask": numbers(ROWS, KEYS + 1)}, AssertionError),
        ({"mask": numbers(ROWS, KEYS).double()}, AssertionError),
        ({"mask": numbers(ROWS, KEYS), **MASKS["bounds"]}, ValueError),
        ({"varlen_starts": torch.zeros(ROWS, dtype=torch.int64)}, ValueError),
        ({"query": numbers(ROWS, BATCH, HEADS, DIM + 1)}, RuntimeError),
    ],
)
def test_wrong_calls_fail_as_upstreams_do(changed: dict[str, Any], raised: type[Exception]) -> None:
    query, key = (each.detach() for each in inputs())
    given = {"query": query, "key": key, "topk_indices": choices(), "softmax_scale": SCALE, "v_channels": VALUE}
    said = []
    for module in PAIRS[newest()]:
        with pytest.raises(raised) as error:
            getattr(module, feature.FUNCTION)(**{**given, **changed})
        said.append(str(error.value))

    assert said[0] == said[1]


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)], ids=str)
def test_quantized_tensors_are_dequantized_once_and_learn(which: tuple[bool, bool], patched: ModuleType) -> None:
    plain = [each.detach().to(torch.float8_e5m2).bfloat16().requires_grad_() for each in inputs()]
    expected, gradients = called(patched, plain, choices())
    pair = [quantized(each, requires_grad=True) if wanted else each for each, wanted in zip(plain, which, strict=True)]

    found, ours = called(patched, pair, choices())

    assert [each.opened for each, wanted in zip(pair, which, strict=True) if wanted] == [1] * sum(which)
    assert all(torch.equal(one, other) for one, other in zip((found, *ours), (expected, *gradients), strict=True))


# Memory


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_no_operator_returns_scores_of_all_keys(
    masks: dict[str, Any], upstream: ModuleType, patched: ModuleType
) -> None:
    seen = []
    for module in (upstream, patched):
        leaves = inputs()
        with MostElements() as watch:
            called(module, leaves, choices(slots=2), **masks)
        seen.append(watch.elements)

    assert seen[0] >= ALL_SCORES
    assert seen[1] < ALL_SCORES / 1.5


# Before installing, and after


def test_the_witness_sees_the_defect_and_the_self_test_that_it_is_gone(version: str) -> None:
    upstream, patched = PAIRS[version]

    seen = OVERLAY.witness(upstream)  # type: ignore[misc]

    assert seen.broken
    assert "operators return all 1920 scores or more: " in seen.seen
    assert OVERLAY.self_test(upstream).broken
    assert not OVERLAY.self_test(patched).broken
    assert not OVERLAY.witness(patched).broken  # type: ignore[misc]


@pytest.mark.parametrize(
    "changed",
    [
        lambda query, *more, **masks: (2 * query, *more),
        lambda query, key, chosen, *more, **masks: (query, key, chosen.roll(1, 1), *more),
        lambda query, key, chosen, *more, **masks: (query, key.flip(0), chosen, *more),
    ],
    ids=["another scale", "other choices", "other keys"],
)
def test_the_witness_does_not_take_other_maths_for_upstreams(changed: Any, upstream: ModuleType) -> None:
    fork = ModuleType("fork")
    own = getattr(upstream, feature.FUNCTION)
    setattr(fork, feature.FUNCTION, lambda *args, **masks: own(*changed(*args, **masks), **masks))

    seen = OVERLAY.witness(fork)  # type: ignore[misc]

    assert not seen.broken
    assert "its result differs from that of the replacement" in seen.seen


@pytest.mark.parametrize("ignored", ["mask", "varlen_starts", "key_positions"])
def test_the_self_test_notices_masks_that_are_ignored(ignored: str, patched: ModuleType) -> None:
    fork = ModuleType("fork")
    own = getattr(patched, feature.FUNCTION)
    setattr(fork, feature.FUNCTION, lambda *args, **masks: own(*args, **{**masks, ignored: None}))

    assert "away from the definition" in OVERLAY.self_test(fork).seen


def test_the_self_test_works_in_any_torch_state_of_the_importing_thread(patched: ModuleType) -> None:
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert not OVERLAY.self_test(patched).broken
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_a_compiled_step_is_one_graph(
    masks: dict[str, Any], patched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, patched.__name__, patched)  # a compiler looks modules up by name
    leaves = inputs()
    expected, gradients = called(patched, leaves, choices(), **masks)
    torch._dynamo.reset()

    def step(query: Any, key: Any, chosen: Any) -> Any:
        return getattr(patched, feature.FUNCTION)(query, key, chosen, SCALE, VALUE, **masks)

    output = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves, choices())
    found = torch.autograd.grad(output, leaves, numbers(*output.shape, seed=9))

    assert torch.equal(output, expected)
    assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True))


# A real layer


OFF = {"MEGACPP_OVERLAY_DSA_SPARSE_ATTENTION": "off", "MEGACPP_OVERLAY_SPARSE_MLA_DIMENSIONS": "off"}


@pytest.fixture(scope="module", params=weekly(*VERSIONS))
def trained(request: pytest.FixtureRequest, wheel: Wheel) -> dict[str, Any]:
    """Reports of a layer of a release that was trained with both overlays, with one of them, and with none."""
    file = wheel("megatron-core", request.param)
    switches = {
        "both": {},
        "attention alone": {"MEGACPP_OVERLAY_SPARSE_MLA_DIMENSIONS": "off"},
        "dimensions alone": {"MEGACPP_OVERLAY_DSA_SPARSE_ATTENTION": "off"},
        "none": OFF,
    }
    script, every_size = SUPPORT / "attention_steps.py", {"MEGACPP_OVERLAYS_SMALL_CALLS": "overlay"}
    return {name: released_megatron.said(file, script, **every_size, **each) for name, each in switches.items()}


def test_a_layer_trains_alike_with_and_without_the_overlays(trained: dict[str, Any]) -> None:
    expected = trained["none"]["ways"]
    assert len(expected) == 8
    for name in ("both", "attention alone", "dimensions alone"):
        for way, found in trained[name]["ways"].items():
            narrow = "bfloat16" in way or "tilelang" in way
            for one, other in zip(
                [found["losses"], *found["learnt"]], [expected[way]["losses"], *expected[way]["learnt"]], strict=True
            ):
                assert away(torch.tensor(one), torch.tensor(other)) <= (1e-2 if narrow else 1e-5), (name, way)
            assert found["losses"][-1] < 0.9 * found["losses"][0]


def test_a_layer_builds_no_scores_of_all_keys(trained: dict[str, Any]) -> None:
    without, loss = trained["none"]["ways"], "with an indexer's loss"

    assert all(each["all scores"] > 0 for each in without.values())
    for name in ("both", "attention alone"):
        ways = trained[name]["ways"]
        assert {way: each["all scores"] for way, each in ways.items() if way != loss} == dict.fromkeys(
            set(ways) - {loss}, 0
        )
        assert ways[loss]["all scores"] < without[loss]["all scores"]  # the rest is the loss's own


def test_calls_that_a_backend_declines_are_served_by_the_overlays(trained: dict[str, Any]) -> None:
    none, tilelang = 5 * 4, 3 * 4

    assert trained["both"]["calls"] == {
        "dsa-sparse-attention": none,
        "sparse-mla-dimensions": tilelang,
        "fp8-quantized-unwrap": tilelang,
    }
    assert trained["attention alone"]["calls"]["dsa-sparse-attention"] == none + tilelang
    assert set(trained["none"]["calls"]) == {"fp8-quantized-unwrap"}
    alone = trained["dimensions alone"]["ways"]
    assert {way: each["all scores"] == 0 for way, each in alone.items()} == {way: "tilelang" in way for way in alone}
