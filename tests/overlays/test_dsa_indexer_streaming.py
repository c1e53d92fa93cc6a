"""DSA's index scores and their gradients, with the seams of the shape and without: alike, and without four axes."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import releases
import torch
from dsa_indexer import (
    ALONE,
    LOSSES,
    WITHOUT_LOSS,
    Largest,
    causal,
    indexer_of,
    inputs_of,
    installed,
    numbers,
    scores_of,
    shape_of,
    supported,
    trained,
)
from dsa_source import install
from hypothesis import given, settings
from hypothesis import strategies as st
from places import SUPPORT
from warm_python import MEGATRON

from megacpp_overlays.feature_probes import dsa_indexer_streaming as feature
from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.attention_target import blocks, indexer_loss
from megacpp_overlays.kernels.chosen_keys import function as chosen_keys
from megacpp_overlays.kernels.chosen_keys import in_torch, query_blocks
from megacpp_overlays.kernels.index_scores import function as index_scores
from megacpp_overlays.kernels.index_scores import reference as index_scores_reference
from megacpp_overlays.kernels.top_k import function as top_k
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.dsa_indexer_streaming import BACKWARD, LOSS, OTHER_TOP_K, OVERLAY, TOP_K
from megacpp_overlays.runtime import large_results
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree
from megacpp_overlays.source.trees import SourceTree

VERSIONS = ("0.16.1", "0.17.0", "0.18.2", releases.newest())
OLDER = "0.17.0"
"""The older release of every day: the oldest whose loss has a backward of its own."""
Wheel = Callable[[str, str], Path]

pytestmark = pytest.mark.usefixtures("small_calls")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with `indexer_tree` on releases and on every given tree, those with `with_loss` on releases with a backward."""
    if "indexer_tree" in metafunc.fixturenames:
        marks = metafunc.definition.iter_markers("usefixtures")
        with_loss = {"with_loss", "with_known_loss"}
        versions = VERSIONS[1:] if any(with_loss & set(mark.args) for mark in marks) else VERSIONS
        given: list[Path] = [path.resolve() for path in metafunc.config.getoption("--upstream-tree")]
        trees = [pytest.param(path, id=f"upstream-{path.name}") for path in given]
        daily = releases.daily(*versions, older=OLDER)
        metafunc.parametrize("indexer_tree", [*daily, *trees], indirect=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, because threads of tiny operators wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


opened = functools.cache(ArchiveTree)


@pytest.fixture
def indexer_tree(request: pytest.FixtureRequest, wheel: Wheel) -> SourceTree:
    if isinstance(request.param, str):
        return opened(wheel("megatron-core", request.param))
    if feature.probe(tree := DirectoryTree(request.param)).verdict is not Verdict.BROKEN:
        pytest.skip("no index scores over four axes in this tree")
    return tree


@pytest.fixture
def upstream(indexer_tree: SourceTree) -> ModuleType:
    return indexer_of(indexer_tree)


@pytest.fixture
def patched(indexer_tree: SourceTree) -> Iterator[ModuleType]:
    module = indexer_of(indexer_tree)
    undo = installed(indexer_tree, module)
    yield module
    undo()


@pytest.fixture
def newest(wheel: Wheel) -> SourceTree:
    return opened(wheel("megatron-core", releases.newest()))


@pytest.fixture
def with_loss(indexer_tree: SourceTree) -> None:
    if shape_of(indexer_tree) == feature.FOUR_AXIS_METHOD:
        pytest.skip("the loss of this tree has no backward of its own")


@pytest.fixture
def with_known_loss(with_loss: None, indexer_tree: SourceTree) -> None:
    if shape_of(indexer_tree) not in WITHOUT_LOSS:
        pytest.skip("the loss of this tree is left to upstream")


def options(module: ModuleType) -> list[dict[str, bool]]:
    """Return the choices of `use_relu` that this version gives its callers."""
    code = getattr(module, feature.SCORES, None)
    return [{"use_relu": True}, {"use_relu": False}] if code and "use_relu" in signature(code) else [{}]


def signature(function: Any) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)


def assert_alike(found: list[Any], expected: list[Any], *, tolerance: float = 2e-6, typical: float = 0.0) -> None:
    """Assert a small Euclidean distance, relative to the expected tensor, or to one of typical numbers if that is larger."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        away, size = (one.double() - other.double()).norm().item(), other.double().norm().item()
        assert away <= tolerance * max(size, typical * one.numel() ** 0.5), (away, size)


def assert_trains_alike(
    upstream: ModuleType, patched: ModuleType, tolerance: float = 1e-5, dtype: torch.dtype = torch.float32, **loss: Any
) -> None:
    """Compare the fused loss and its gradients, of the same inputs."""
    (expected_loss, expected), (found_loss, found) = (
        trained(module, inputs_of(7, 9, dtype=dtype), **loss) for module in (upstream, patched)
    )
    assert_alike([found_loss], [expected_loss])
    assert_alike(found, expected, tolerance=tolerance)
    assert all(each.count_nonzero() for each in found)


def known_losses(module: ModuleType) -> list[dict[str, Any]]:
    """Return the losses that this version takes."""
    return [loss for loss in LOSSES.values() if supported(module, **loss) == loss]


# Where it is worth it


@pytest.mark.usefixtures("with_loss")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_call_is_upstreams_own_where_no_kernel_was_measured(
    upstream: ModuleType, patched: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_calls_of_every_size", 0)

    (expected, of_expected), (found, of_found) = (
        trained(module, inputs_of(7, 9, dtype=dtype)) for module in (upstream, patched)
    )

    assert torch.equal(found, expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(of_found, of_expected, strict=True))


@pytest.mark.usefixtures("with_loss")
def test_a_call_is_served_where_upstreams_four_axes_are_large(
    patched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_calls_of_every_size", 0)
    monkeypatch.setattr(measured, "SMALL", 0)

    with Largest() as largest:
        trained(patched, inputs_of(8, 6, heads=32, dim=2))

    assert largest.elements < 8 * 2 * 32 * 6 / 2


# Before installing, and after


def test_the_witness_sees_four_axes_where_the_probe_does(upstream: ModuleType) -> None:
    seen = OVERLAY.witness(upstream)  # type: ignore[misc]

    assert seen.broken
    assert "operators return 384 or more elements" in seen.seen


def test_the_self_test_passes_with_the_seams_and_not_without(upstream: ModuleType, patched: ModuleType) -> None:
    assert OVERLAY.self_test(upstream).broken
    assert not OVERLAY.self_test(patched).broken
    assert not OVERLAY.witness(patched).broken  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("index_scores.sum(dim=2)", "index_scores.mean(dim=2)"),
        ("q.float(), k.float())\n    if", "q.bfloat16().float(), k.bfloat16().float())\n    if"),
        ("torch.relu(index_scores)", "torch.nn.functional.gelu(index_scores)"),
        ("scores > 0", "scores < 0"),
        (
            "(index_scores_softmax - attention_scores_normalized)",
            "(index_scores_softmax - 2 * attention_scores_normalized)",
        ),
    ],
    ids=["another sum", "rounded inputs", "another activation", "another relu backward", "another loss"],
)
def test_the_witness_does_not_take_other_maths_for_upstreams(newest: SourceTree, old: str, new: str) -> None:
    import ast

    source = newest.module(feature.TARGET.module)
    assert source is not None
    module = indexer_of(newest)
    for name in (feature.SCORES, BACKWARD):
        text = ast.unparse(source.function(name))  # type: ignore[arg-type]
        exec(compile(f"from __future__ import annotations\n{text.replace(old, new)}", "fork.py", "exec"), vars(module))

    seen = OVERLAY.witness(module)  # type: ignore[misc]

    assert not seen.broken
    assert "its result differs from that of the replacement" in seen.seen


def test_the_self_test_notices_wrong_scores_wrong_gradients_and_a_wrong_loss(
    indexer_tree: SourceTree, patched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, gradients, per_row = index_scores.scores, index_scores.gradients, indexer_loss.per_row
    with monkeypatch.context() as patch:
        patch.setattr(index_scores, "scores", lambda *args, **kwargs: 1.01 * scores(*args, **kwargs))
        assert "away from the definition" in OVERLAY.self_test(patched).seen
    with monkeypatch.context() as patch:
        patch.setattr(index_scores, "gradients", lambda *args, **kwargs: gradients(*args, **kwargs)[::-1])
        assert OVERLAY.self_test(patched).broken is hasattr(patched, BACKWARD)
    with monkeypatch.context() as patch:
        patch.setattr(index_scores, "scores", index_scores_reference.scores)
        assert OVERLAY.self_test(patched).broken
    with monkeypatch.context() as patch:
        patch.setattr(indexer_loss, "per_row", lambda *args: 1.01 * per_row(*args))
        assert OVERLAY.self_test(patched).broken is (shape_of(indexer_tree) in WITHOUT_LOSS)
    assert not OVERLAY.self_test(patched).broken


def test_it_works_in_any_state_of_the_importing_thread(patched: ModuleType) -> None:
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert not OVERLAY.self_test(patched).broken
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.cuda.is_initialized()


# Scores


@settings(max_examples=25, deadline=None)
@given(
    queries=st.integers(1, 9), keys=st.integers(1, 11), batch=st.integers(1, 3), heads=st.integers(1, 5), dim=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@pytest.mark.parametrize("version", releases.daily(*VERSIONS, older=OLDER))
def test_scores_and_their_autograd_are_upstreams(
    version: str,
    queries: int,
    keys: int,
    batch: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    strided: bool,
    seed: int,
) -> None:
    upstream, patched = PAIRS[version]
    inputs = inputs_of(queries, keys, batch, heads, dim, dtype, seed)
    if strided:  # as sequence-parallel and context-parallel slices are
        inputs = [each.detach().repeat_interleave(2, 1)[:, ::2].requires_grad_() for each in inputs]
    above = numbers(batch, queries, keys, seed=seed)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    for option in options(upstream):
        expected, found = scores_of(upstream)(*inputs, **option), scores_of(patched)(*inputs, **option)

        assert_alike([found], [expected], typical=1.0)  # heads may cancel
        gradients = [list(torch.autograd.grad(each, inputs, above)) for each in (found, expected)]
        assert_alike(*gradients, tolerance=tolerance, typical=1.0)


class Pairs(dict[str, tuple[ModuleType, ModuleType]]):
    """For each version, the module without seams and with them, made on demand, because hypothesis runs many cases on each."""

    wheel: Wheel

    def __missing__(self, version: str) -> tuple[ModuleType, ModuleType]:
        tree = opened(self.wheel("megatron-core", version))
        self[version] = indexer_of(tree), indexer_of(tree)
        installed(tree, self[version][1])
        return self[version]


PAIRS = Pairs()


@pytest.fixture(autouse=True, scope="module")
def pairs(wheel: Wheel) -> Iterator[None]:
    PAIRS.wheel = wheel
    yield
    PAIRS.clear()


def test_the_sparse_loss_writes_its_mask_into_the_scores(upstream: ModuleType, patched: ModuleType) -> None:
    """As `DSAIndexer.forward_with_scores` and `compute_dsa_indexer_loss` do between them."""
    results = []
    for module in (upstream, patched):
        inputs = inputs_of(6, 6)
        scores = scores_of(module)(*inputs)
        scores = scores + causal(6, 6)
        indices = scores.topk(3, dim=-1)[1]
        query, key = numbers(6, 2, 3, 5, seed=7), numbers(6, 2, 3, 5, seed=8)
        more = {"mask": causal(6, 6)} if "mask" in signature(module.compute_dsa_indexer_loss) else {}
        loss = module.compute_dsa_indexer_loss(scores, indices, query, key, 0.4, 0.1, True, ALONE, **more)
        results.append([loss.detach(), *torch.autograd.grad(loss, inputs)])

    assert_alike(results[1], results[0], tolerance=1e-5)


# The backward of the fused loss


@pytest.mark.usefixtures("with_loss")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_trains_as_upstreams(upstream: ModuleType, patched: ModuleType, dtype: torch.dtype) -> None:
    assert len(known_losses(upstream)) >= 2
    for loss, option in itertools.product(known_losses(upstream), options(upstream)):
        assert_trains_alike(upstream, patched, 1e-5 if dtype == torch.float32 else 1e-2, dtype, **loss, **option)


CHOSEN: dict[str, dict[str, Any]] = {
    "packed": {},
    "per token": {"calculate_per_token_loss": True},
    "padded rows": {"query_valid_rows": torch.tensor([True] * 5 + [False] * 2)},
    "all keys": {"topk": 20},
    "a query that sees nothing": {"varlen_ends": torch.tensor([1, 2, 3, 3, 5, 6, 9])},
    "bare products": {"use_relu": False},
}
"""Arguments of sparse losses of attention whose heads share their keys, in addition to `over_chosen_keys`."""


def over_chosen_keys(queries: int = 7, keys: int = 9) -> dict[str, Any]:
    return {
        "sparse_loss": True,
        "mask": None,
        "varlen_starts": torch.tensor([0, 0, 0] + [3] * (queries - 3)),
        "varlen_ends": torch.tensor([*range(1, queries), keys]),
        "query": numbers(queries, 2, 3, 5, seed=7),
        "key": numbers(keys, 2, 1, 5, seed=8).expand(-1, -1, 3, -1),
    }


HAS_KERNELS = chosen_keys.has_kernels


@pytest.fixture
def chosen_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each choice of keys in blocks of queries, with PyTorch's operators in the place of kernels."""
    monkeypatch.setattr(chosen_keys, "has_kernels", lambda *_: True)
    calls: list[str] = []
    choose = chosen_keys.choose

    def noted(*args: Any) -> Any:
        calls.append("choose")
        return choose(*args)

    monkeypatch.setattr(chosen_keys, "choose", noted)
    return calls


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sparse_loss_over_chosen_keys_trains_as_upstreams(
    kind: str, dtype: torch.dtype, chosen_calls: list[str]
) -> None:
    upstream, patched = PAIRS[releases.newest()]
    given = {**over_chosen_keys(), **CHOSEN[kind]}

    assert_trains_alike(upstream, patched, 1e-5 if dtype == torch.float32 else 1e-2, dtype, **given)

    assert chosen_calls == ["choose"]


@pytest.mark.parametrize(
    "other",
    [
        {"sparse_loss": False},
        {"mask": causal(7, 9), "varlen_starts": None, "varlen_ends": None},
        {"key_positions": torch.arange(9).flip(0)},
        {"key": numbers(9, 2, 3, 5, seed=8)},
    ],
    ids=["dense", "mask", "positions of keys", "keys of each head"],
)
def test_other_losses_go_the_way_of_all_scores(other: dict[str, Any], chosen_calls: list[str]) -> None:
    upstream, patched = PAIRS[releases.newest()]

    assert_trains_alike(upstream, patched, **{**over_chosen_keys(), **other})

    assert chosen_calls == []


def test_a_small_sparse_loss_is_upstreams_own(chosen_calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_calls_of_every_size", 0)

    expected, found = (trained(module, inputs_of(7, 9), **over_chosen_keys()) for module in PAIRS[releases.newest()])

    assert chosen_calls == []
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


def test_without_kernels_a_sparse_loss_goes_the_way_of_all_scores(
    chosen_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_keys, "has_kernels", HAS_KERNELS)
    _, patched = PAIRS[releases.newest()]

    found, _ = trained(patched, inputs_of(7, 9), **over_chosen_keys())

    assert chosen_calls == []
    assert found > 0


def test_targets_of_chosen_keys_are_summed_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same heads: the sum is twice as large, and once it is normalised the loss is that of one rank."""
    summed: list[tuple[int, ...]] = []

    def twice(tensor: Any, group: Any) -> None:
        summed.append(tuple(tensor.shape))
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", twice)
    monkeypatch.setattr(chosen_keys, "has_kernels", lambda *_: True)
    _, patched = PAIRS[releases.newest()]
    ranks = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2))

    alone = trained(patched, inputs_of(7, 9), **over_chosen_keys())
    together = trained(patched, inputs_of(7, 9), ranks, **over_chosen_keys())

    assert summed == [(2, 7, 3)]
    assert_alike([together[0], *together[1]], [alone[0], *alone[1]])


def test_nothing_of_all_queries_and_keys_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_keys, "has_kernels", lambda *_: True)
    monkeypatch.setattr(query_blocks, "_BLOCK_BYTES", 4 * 2 * 300 * 20)
    monkeypatch.setattr(in_torch, "_BLOCK_ELEMENTS", 1000)
    _, patched = PAIRS[releases.newest()]

    with Largest() as largest:
        trained(patched, inputs_of(300, 300, dim=2), **over_chosen_keys(300, 300))

    assert 0 < largest.elements <= 300 * 300  # a mask that the case itself makes, and does not hand over


@pytest.mark.usefixtures("with_loss")
def test_two_threads_may_go_backward_at_once(upstream: ModuleType, patched: ModuleType) -> None:
    cases = [
        {"inputs": inputs_of(9, 7, seed=seed), **options(upstream)[seed % len(options(upstream))]} for seed in range(4)
    ]
    expected = [trained(upstream, **case)[1] for case in cases]
    found: list[list[list[Any]]] = [[] for _ in cases]
    start = threading.Barrier(len(cases))

    def run(number: int) -> None:
        start.wait()
        for _ in range(10):
            found[number].append(trained(patched, **cases[number])[1])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number, results in enumerate(found):
        assert len(results) == 10
        for result in results:
            assert_alike(result, expected[number], tolerance=1e-5)


def without_loss(tree: SourceTree, module: ModuleType) -> Any:
    """Install the seams for a release whose loss has an unknown body, and return the function that undoes them."""
    return install(OVERLAY, WITHOUT_LOSS[shape_of(tree)], module)


@pytest.mark.parametrize("version", releases.daily(OLDER, releases.newest()))
def test_a_loss_that_is_not_known_is_left_to_upstream_and_trains_alike(version: str, wheel: Wheel) -> None:
    tree, (upstream, _) = ArchiveTree(wheel("megatron-core", version)), PAIRS[version]
    module = indexer_of(tree)
    loss_of_upstream = module.compute_dsa_indexer_loss
    undo = without_loss(tree, module)
    for loss, option in itertools.product(known_losses(upstream), options(upstream)):
        assert_trains_alike(upstream, module, **loss, **option)
    assert module.compute_dsa_indexer_loss is loss_of_upstream
    assert not OVERLAY.self_test(module).broken
    undo()


def test_a_backward_that_does_something_else_is_an_error_with_a_way_out(newest: SourceTree) -> None:
    module = indexer_of(newest)

    def bwd_fused_indexer_loss_naive(q: Any, weights: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        return q.abs(), weights, k

    setattr(module, BACKWARD, bwd_fused_indexer_loss_naive)
    without_loss(newest, module)

    with pytest.raises(
        AttributeError, match=r"for abs: .*MEGACPP_OVERLAY_DSA_INDEXER_STREAMING=off leaves it to upstream"
    ):
        trained(module, inputs_of(4, 6))


def test_a_score_function_that_is_put_over_ours_cannot_go_unnoticed(newest: SourceTree) -> None:
    module = indexer_of(newest)
    original = module._compute_index_scores
    without_loss(newest, module)
    module._compute_index_scores = original

    with pytest.raises((AttributeError, RuntimeError), match="MEGACPP_OVERLAY_DSA_INDEXER_STREAMING=off"):
        trained(module, inputs_of(4, 6))


def test_loss_and_backward_call_a_score_function_that_replaces_ours(newest: SourceTree) -> None:
    module, (upstream, _) = indexer_of(newest), PAIRS[releases.newest()]
    installed(newest, module)
    calls = []
    original = upstream._compute_index_scores
    module._compute_index_scores = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)

    inputs = inputs_of(4, 6)
    found, expected = (trained(each, inputs)[1] for each in (module, upstream))

    assert len(calls) == 2
    assert_alike(found, expected, tolerance=1e-5)


# The choice of keys


CHOICES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"mask": causal(7, 9)},
    "three-axis mask": {"mask": causal(7, 9).expand(2, 7, 9)},
    "packed": {name: LOSSES["packed"][name] for name in ("varlen_starts", "varlen_ends")},
    "other key positions": {**LOSSES["other key positions"], "mask": None},
}


@pytest.fixture
def by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the device of the keys has the kernel, so that its reference computes."""
    monkeypatch.setattr(top_k, "has_kernel", lambda _device: True)


@pytest.mark.usefixtures("with_known_loss", "by_the_kernel")
@pytest.mark.parametrize("k", [0, 1, 4, 9, 50])
@pytest.mark.parametrize("name", CHOICES)
def test_the_chosen_keys_are_upstreams_in_the_order_of_positions(
    upstream: ModuleType, patched: ModuleType, name: str, k: int
) -> None:
    case, queries = CHOICES[name], 7
    if not set(case) <= set(signature(upstream.fused_qk_topk_naive)):
        pytest.skip("this version takes no bounds")
    q, weights, keys = inputs_of(queries, 9, heads=16)  # with few heads some scores are all rectified, and equal
    for option in options(upstream):
        (of_theirs, theirs), (scores, found) = (
            module.fused_qk_topk_naive(q, keys, weights, k, **case, **option) for module in (upstream, patched)
        )

        assert torch.equal(scores.isinf(), of_theirs.isinf())
        assert_alike([scores.masked_fill(scores.isinf(), 0)], [of_theirs.masked_fill(scores.isinf(), 0)])
        assert (found.dtype, found.shape) == (theirs.dtype, theirs.shape)
        finite = [
            each.where((each >= 0) & (scores.gather(-1, each.clamp_min(0)) > -torch.inf), 9) for each in (theirs, found)
        ]
        assert torch.equal(finite[0].sort(dim=-1).values, finite[1].sort(dim=-1).values)
        assert torch.equal((found < 0).sum(dim=-1), (theirs < 0).sum(dim=-1))
        ascending = [row[row >= 0] for row in found.flatten(0, 1)]
        assert all(torch.equal(row, row.sort().values) for row in ascending)


@pytest.mark.usefixtures("with_known_loss", "by_the_kernel")
def test_scores_of_all_keys_are_computed_only_when_they_are_read(
    upstream: ModuleType, patched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CHOICES["packed"]
    if not set(case) <= set(signature(upstream.fused_qk_topk_naive)):
        pytest.skip("this version takes no bounds")
    monkeypatch.setattr(query_blocks, "_BLOCK_BYTES", 1)  # a query at a time
    q, weights, keys = inputs_of(7, 9, heads=16)
    of_theirs, theirs = upstream.fused_qk_topk_naive(q, keys, weights, 4, **case)
    large: list[str] = []

    with torch.no_grad(), large_results.watch(of_theirs.numel(), large):
        scores, found = patched.fused_qk_topk_naive(q, keys, weights, 4, **case)

    assert large == []
    assert torch.equal(found.sort(dim=-1).values, theirs.sort(dim=-1).values)
    assert_alike([scores.where(of_theirs.isfinite(), 0)], [of_theirs.where(of_theirs.isfinite(), 0)])
    learnt, _ = patched.fused_qk_topk_naive(q.clone().requires_grad_(), keys, weights, 4, **case)
    assert learnt.requires_grad


@pytest.mark.usefixtures("with_known_loss", "by_the_kernel")
def test_a_mask_of_another_dtype_is_refused_as_upstream_does(upstream: ModuleType, patched: ModuleType) -> None:
    q, weights, k = inputs_of(7, 9)
    for module in (upstream, patched):
        with pytest.raises(AssertionError, match=r"(?i)mask.* dtype"):
            module.fused_qk_topk_naive(q, k, weights, 3, causal(7, 9).double())


@pytest.mark.usefixtures("with_known_loss", "by_the_kernel")
def test_the_loss_over_the_keys_that_are_chosen_so_trains_alike(upstream: ModuleType, patched: ModuleType) -> None:
    for loss in known_losses(upstream):
        assert_trains_alike(upstream, patched, **loss)


@pytest.mark.usefixtures("with_known_loss")
@pytest.mark.parametrize(("device", "longest"), [(False, 99), (True, 8)], ids=["no kernel", "most of longer rows"])
def test_where_the_kernel_is_not_it_is_upstreams_choice(
    upstream: ModuleType, patched: ModuleType, monkeypatch: pytest.MonkeyPatch, device: bool, longest: int
) -> None:
    monkeypatch.setattr(top_k, "has_kernel", lambda _device: device)
    monkeypatch.setattr(top_k, "LONGEST", longest)
    monkeypatch.setattr(top_k, "MOST_OF_LONG_ROWS", 3)
    monkeypatch.setattr(top_k, "choose", None)
    q, weights, k = inputs_of(7, 9)

    _, theirs = upstream.fused_qk_topk_naive(q, k, weights, 4, causal(7, 9))
    _, found = patched.fused_qk_topk_naive(q, k, weights, 4, causal(7, 9))

    assert torch.equal(found[:, 4:], theirs[:, 4:])  # where no score is negative infinity there is one order


@pytest.mark.usefixtures("with_known_loss")
def test_attention_asks_for_no_order_of_the_keys(upstream: ModuleType) -> None:
    """In any order, and with sentinels anywhere, attention over chosen keys is the same up to the order of its sums."""
    query, key, value = (
        numbers(*shape, seed=seed) for seed, shape in ((1, (7, 2, 3, 5)), (2, (9, 2, 3, 5)), (3, (9, 2, 3, 4)))
    )
    scores = numbers(2, 7, 9, seed=4) + causal(7, 9)
    chosen = scores.topk(4, dim=-1)[1]
    more: dict[str, Any] = {}
    if "mask" in signature(upstream.unfused_dsa_fn):
        chosen, more = chosen.masked_fill(scores.gather(-1, chosen) == -torch.inf, -1), {"mask": causal(7, 9)}

    expected = upstream.unfused_dsa_fn(query, key, value, chosen, 0.4, **more)

    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        assert_alike([upstream.unfused_dsa_fn(query, key, value, chosen[..., order], 0.4, **more)], [expected])


@pytest.mark.parametrize("version", releases.daily(OLDER, releases.newest()))
def test_a_choice_that_is_not_known_is_left_to_upstream_and_the_rest_is_not(version: str, wheel: Wheel) -> None:
    tree = ArchiveTree(wheel("megatron-core", version))
    module = indexer_of(tree)
    choice, loss = getattr(module, TOP_K), getattr(module, LOSS)

    undo = install(OVERLAY, OTHER_TOP_K[shape_of(tree)], module)

    assert getattr(module, TOP_K) is choice
    assert getattr(module, LOSS) is not loss
    assert not OVERLAY.self_test(module).broken
    undo()


# The main attention's scores


@pytest.mark.usefixtures("with_known_loss")
@pytest.mark.parametrize("sparse", [False, True])
def test_neither_direction_holds_the_heads_of_the_main_attention(
    upstream: ModuleType, patched: ModuleType, sparse: bool
) -> None:
    query, key = numbers(8, 2, 32, 2, seed=7), numbers(6, 2, 32, 2, seed=8)
    four_axes = 8 * 2 * 32 * 6
    seen = []
    for module in (upstream, patched):
        with Largest() as watch:
            trained(module, inputs_of(8, 6, heads=1, dim=2), query=query, key=key, sparse_loss=sparse)
        seen.append(watch.elements)

    assert seen[0] >= four_axes
    assert seen[1] < four_axes / 2


@pytest.mark.usefixtures("with_known_loss")
def test_where_autograd_goes_through_the_loss_it_is_upstreams(upstream: ModuleType, patched: ModuleType) -> None:
    more = {"mask": causal(6, 6)} if "mask" in signature(upstream.compute_dsa_indexer_loss) else {}
    results = []
    for module in (upstream, patched):
        scores = (numbers(2, 6, 6) + causal(6, 6)).requires_grad_()
        query, key = (numbers(6, 2, 3, 5, seed=seed).requires_grad_() for seed in (7, 8))
        indices = scores.topk(3, dim=-1)[1]
        loss = module.compute_dsa_indexer_loss(scores.clone(), indices, query, key, 0.4, 0.1, False, ALONE, **more)
        results.append([loss, *torch.autograd.grad(loss, [scores, query, key])])

    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.usefixtures("with_known_loss")
def test_the_loss_leaves_the_scores_and_the_mask_of_its_caller_alone(patched: ModuleType) -> None:
    mask = causal(6, 6)
    more = {"mask": mask} if "mask" in signature(patched.compute_dsa_indexer_loss) else {}
    scores = numbers(2, 6, 6) + mask
    before = scores.clone()
    query, key = numbers(6, 2, 3, 5, seed=7), numbers(6, 2, 3, 5, seed=8)

    patched.compute_dsa_indexer_loss(scores, scores.topk(3, dim=-1)[1], query, key, 0.4, 0.1, True, ALONE, **more)

    assert torch.equal(scores, before)
    assert torch.equal(mask, causal(6, 6))


@pytest.mark.usefixtures("with_known_loss")
@pytest.mark.parametrize("elements", [1, 2 * 9, 2 * 9 * 3])
def test_blocks_of_queries_change_nothing(
    upstream: ModuleType, patched: ModuleType, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS", elements)
    for loss in known_losses(upstream):
        assert_trains_alike(upstream, patched, **loss)


def test_a_packed_query_without_a_batch_axis_is_taken() -> None:
    upstream, patched = PAIRS[releases.newest()]
    inputs = inputs_of(7, 9, batch=1)
    loss = {**LOSSES["packed"], "query": numbers(7, 3, 5, seed=7), "key": numbers(9, 3, 5, seed=8)}
    (of_theirs, theirs), (of_ours, ours) = (trained(each, inputs, **loss) for each in (upstream, patched))

    assert_alike([of_ours], [of_theirs])
    assert_alike(ours, theirs, tolerance=1e-5)


def test_a_mask_with_finite_numbers_counts_as_it_does_upstream() -> None:
    upstream, patched = PAIRS[releases.newest()]
    mask = (causal(7, 9) + numbers(7, 9, seed=3)).masked_fill(numbers(7, 9, seed=4) > 1.5, float("-inf"))
    for sparse in (False, True):
        assert_trains_alike(upstream, patched, mask=mask, sparse_loss=sparse)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": causal(7, 9).double()},
        {"mask": causal(6, 9)},
        {"mask": causal(7, 9), "varlen_starts": torch.zeros(7, dtype=torch.int64)},
        {"query_valid_rows": torch.ones(6, dtype=torch.bool)},
    ],
    ids=["another dtype", "another size", "mask and bounds", "rows of another number"],
)
def test_calls_that_upstream_refuses_are_refused(wrong: dict[str, Any]) -> None:
    scores, query, key = numbers(2, 7, 9), numbers(7, 2, 3, 5), numbers(9, 2, 3, 5)
    for module in PAIRS[releases.newest()]:
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            module.compute_dsa_indexer_loss(
                scores.clone(), scores.topk(3)[1], query, key, 0.4, 0.1, False, ALONE, **wrong
            )


# Compiled


@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("version", releases.daily(OLDER, releases.newest(), older=releases.newest()))
def test_a_compiled_step_stays_one_graph_without_four_axes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream, patched = PAIRS[version]
    inputs = inputs_of(8, 6, heads=32, dim=2)
    loss = [numbers(8, 2, 3, 5, seed=7), numbers(6, 2, 3, 5, seed=8), 0.4, 3, 0.1, causal(8, 6), False, ALONE]
    seen: dict[ModuleType, Any] = {}
    for module in (upstream, patched):
        for each in (module, *helpers_of(module)):
            monkeypatch.setitem(sys.modules, each.__name__, each)  # a compiler looks modules up by name

        def step(q: Any, weights: Any, k: Any, module: ModuleType = module) -> Any:
            return 2 * module.FusedDSAIndexerLoss.apply(q, weights, k, *loss)[1]

        torch._dynamo.reset()
        explained = torch._dynamo.explain(step)(*inputs)
        torch._dynamo.reset()
        graphs: list[Any] = []
        compiled = torch.compile(step, backend=collecting(graphs), fullgraph=True)
        gradients = list(torch.autograd.grad(compiled(*inputs), inputs))
        seen[module] = explained.graph_count, explained.graph_break_count, max(map(largest, graphs)), gradients

    assert seen[upstream][:2] == seen[patched][:2] == (1, 0)
    assert seen[patched][2] < 8 * 2 * 32 * 6 / 2 < seen[upstream][2]
    assert_alike(seen[patched][3], seen[upstream][3], tolerance=1e-5)


def helpers_of(module: ModuleType) -> Iterator[ModuleType]:
    for each in vars(module).values():
        if isinstance(each, ModuleType) and each is not torch:
            yield from (each, *helpers_of(each))


def collecting(graphs: list[Any]) -> Any:
    """Return a backend that runs graphs as they are and keeps them, forward and backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


def largest(graph: Any) -> int:
    values = [node.meta.get("val") for node in graph.graph.nodes]
    return max(value.numel() for value in values if isinstance(value, torch.Tensor))


# Tensor parallelism


RANKS = """
import json, os, sys, torch, warnings
sys.path[:0] = {tests!r}
warnings.simplefilter("ignore")
from pathlib import Path
from types import SimpleNamespace
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
from dsa_indexer import indexer_of, inputs_of, installed, numbers, trained
from megacpp_overlays.source.file_trees import ArchiveTree
tree = ArchiveTree(Path({wheel!r}))
group = SimpleNamespace(tp=torch.distributed.group.WORLD)
calls = []
reduce = torch.distributed.all_reduce
torch.distributed.all_reduce = lambda *args, **kwargs: (calls.append(1), reduce(*args, **kwargs))[1]
results, counts = [], []
for seams in (False, True):
    module = indexer_of(tree)
    if seams:
        installed(tree, module)
    calls.clear()
    results.append(trained(module, inputs_of(7, 9), group, query=numbers(7, 2, 3, 5, seed=20 + rank))[1])
    counts.append(len(calls))
away = max(((a - b).norm() / b.norm()).item() for a, b in zip(*results))
print(json.dumps(dict(away=away, counts=counts, first=results[1][0].flatten()[:3].tolist())))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("version", releases.daily(OLDER, releases.newest(), older=releases.newest()))
def test_tensor_parallel_ranks_reduce_the_target_as_often_as_upstream(
    version: str, wheel: Wheel, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    folder = SUPPORT
    code = RANKS.format(tests=[str(folder)], store=tmp_path / "store", wheel=str(wheel("megatron-core", version)))
    done: list[Any] = [None, None]

    def run(rank: int) -> None:
        done[rank] = run_python(
            code,
            after=MEGATRON,
            RANK=str(rank),
            OMP_NUM_THREADS="1",
            MEGACPP_OVERLAYS_LOG="logging",
            MEGACPP_OVERLAYS_SMALL_CALLS="overlay",
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [json.loads(each.stdout.splitlines()[-1]) for each in done]

    assert [each["counts"] for each in found] == [[2, 2], [2, 2]]  # the loss and its gradient, once each
    assert found[0]["first"] == found[1]["first"]
    assert all(each["away"] < 1e-5 for each in found)
