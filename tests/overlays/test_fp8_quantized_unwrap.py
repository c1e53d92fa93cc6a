"""Quantized query and key at the SparseMLA dispatcher, upstream and with the seam."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import warm_python
from fp8_dispatch import AsFloat8, Kernel, TraceableKernel, inputs, kernel_in, kinds, part_of, quantized, seam_in
from placed_seams import stock
from places import HANG_S, ROOT, SUPPORT
from trees import STAND_INS
from warm_python import MEGATRON

from megacpp_overlays import fp8_sparse_mla
from megacpp_overlays.feature_probes import fp8_quantized_unwrap as feature
from megacpp_overlays.model import Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

RELEASE = part_of(feature.TARGET.module)
SPRING = part_of(feature.SPRING_TARGET.module)
PLAIN, POINTER_0 = ["Tensor at True"], ["AsFloat8 at False"]

pytestmark = pytest.mark.upstream


without_tilelang = pytest.mark.skipif(find_spec("tilelang") is not None, reason="tilelang is in this environment")

# On every tree that has a dispatcher: ours, and real ones


def test_on_a_tree(tree: Path) -> None:
    found = {part.target.module: part.probe(DirectoryTree(tree)) for part in (RELEASE, SPRING)}
    broken = {name: finding.shape for name, finding in found.items() if finding.verdict is Verdict.BROKEN}
    if not broken:
        pytest.skip("no dispatcher in this tree")
    for name, shape in broken.items():
        path = os.pathsep.join(map(str, (tree, ROOT, SUPPORT)))
        env = {**os.environ, "PYTHONPATH": path, "MEGACPP_OVERLAYS": "off"}
        command = ["-W", "ignore", SUPPORT / "fp8_dispatch.py", name]
        done = warm_python.run(command, env, after=MEGATRON, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == {
            "plain": PLAIN,
            "before": POINTER_0 if shape == feature.PER_BATCH else PLAIN,
            "after": PLAIN,
            "opened": [1, 1],
            "equal": True,
            "gradients": [True, True],
            "witness": [True, False],
            "declined without a kernel": True,
        }


# On the release that is installed here


module = stock(RELEASE.target.module)


@pytest.fixture
def seam(module: ModuleType) -> Iterator[Any]:
    with seam_in(module, RELEASE) as placed:
        yield placed


@pytest.fixture
def kernel(module: ModuleType) -> Iterator[Kernel]:
    with kernel_in(module, Kernel()) as recorder:
        yield recorder


def call(module: ModuleType, query: Any, key: Any, **changed: Any) -> Any:
    """Call the dispatcher by the way that the backend takes."""
    given = {"topk_indices": inputs()[2], "softmax_scale": 0.5, "v_channels": 512, **changed}
    return module.run_fused_absorbed_sparse_attention(query, key, **given)  # type: ignore[attr-defined]


@pytest.mark.unmeasured
def test_upstream_takes_a_quantized_tensor_for_bf16(module: ModuleType, kernel: Kernel) -> None:
    query, key, _ = inputs()
    assert module._all_bfloat16(quantized(query), quantized(key))  # type: ignore[attr-defined]
    assert call(module, quantized(query), quantized(key)) is not None
    assert kinds(kernel) == PLAIN


def test_plain_tensors_go_through_untouched(module: ModuleType, seam: Any, kernel: Kernel) -> None:
    query, key, indices = inputs()
    parameter = torch.nn.Parameter(query)
    expected = call(module, query, key)
    assert torch.equal(call(module, parameter, key), expected)
    assert torch.equal(
        module.fused_sparse_mla_absorbed(  # type: ignore[attr-defined]
            v_channels=512, softmax_scale=0.5, topk_indices=indices, key=key, query=query
        ),
        expected,
    )
    for got, given in zip(kernel.got[0], (query, key), strict=True):
        assert torch.equal(got, given.permute(1, 0, 2, 3))


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_each_quantized_tensor_is_opened_once(
    which: tuple[bool, bool], by_name: bool, module: ModuleType, seam: Any, kernel: Kernel
) -> None:
    query, key, indices = inputs()
    expected = call(module, query, key)
    pair = [quantized(each) if wanted else each for each, wanted in zip((query, key), which, strict=True)]
    if by_name:
        given = {"query": pair[0], "key": pair[1], "topk_indices": indices, "softmax_scale": 0.5, "v_channels": 512}
        output = module.fused_sparse_mla_absorbed(**given)  # type: ignore[attr-defined]
    else:
        output = call(module, *pair)
    assert torch.equal(output, expected)
    assert kinds(kernel) == PLAIN
    assert [each.opened for each in pair if isinstance(each, AsFloat8)] == [1] * sum(which)


def test_gradients_are_those_of_the_plain_call(module: ModuleType, seam: Any, kernel: Kernel) -> None:
    query, key, _ = inputs()
    plain = query.clone().requires_grad_(), key.clone().requires_grad_()
    call(module, *plain).sum().backward()
    pair = quantized(query, requires_grad=True), quantized(key, requires_grad=True)
    call(module, *pair).sum().backward()
    for one, other in zip(pair, plain, strict=True):
        assert torch.equal(one.grad, other.grad)


@without_tilelang
def test_where_upstream_declines_nothing_is_opened_without_a_kernel(module: ModuleType, seam: Any) -> None:
    query, key, _ = inputs()
    pair = quantized(query), quantized(key)
    assert module.SparseMLA is None  # type: ignore[attr-defined]
    assert call(module, *pair) is None
    assert [each.opened for each in pair] == [0, 0]


def test_calls_that_upstream_declines_stay_declined(module: ModuleType, seam: Any, kernel: Kernel) -> None:
    query, key, _ = inputs()
    assert call(module, quantized(query), quantized(key), v_channels=64) is None
    assert kernel.got == []


def test_wrong_calls_fail_as_upstreams_do(module: ModuleType, seam: Any) -> None:
    query, key, _ = inputs()
    with pytest.raises(TypeError, match="missing 3 required positional arguments"):
        module.fused_sparse_mla_absorbed(query, key)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="unexpected keyword argument 'topk'"):
        module.fused_sparse_mla_absorbed(query, key, topk=1)  # type: ignore[attr-defined]


# The FP8-aware kernel


def test_a_registered_kernel_gets_the_arguments_as_they_were(module: ModuleType, seam: Any, kernel: Kernel) -> None:
    query, key, indices = inputs()
    asked: list[tuple[Any, ...]] = []

    def fp8_kernel(*args: Any) -> str:
        asked.append(args)
        return "its output"

    pair = quantized(query), key
    forget = fp8_sparse_mla.register(fp8_kernel)
    try:
        output = module.fused_sparse_mla_absorbed(*pair, indices, 0.5, 512)  # type: ignore[attr-defined]
        assert output == "its output"
        assert call(module, query, key) is not None
    finally:
        forget()
    ((given_query, given_key, given_indices, *rest),) = asked  # plain tensors never reach it
    assert given_query is pair[0]
    assert given_key is key
    assert given_indices is indices
    assert rest == [0.5, 512]
    assert pair[0].opened == 0


def test_a_kernel_that_declines_leaves_the_tensors_to_be_opened(module: ModuleType, seam: Any, kernel: Kernel) -> None:
    query, key, _ = inputs()
    pair = quantized(query), quantized(key)
    forget = fp8_sparse_mla.register(lambda *_: None)
    try:
        assert torch.equal(call(module, *pair), call(module, query, key))
    finally:
        forget()
    assert [each.opened for each in pair] == [1, 1]


def test_a_registered_kernel_is_not_asked_by_the_self_test(module: ModuleType, seam: Any) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("a self-test is not for it")

    forget = fp8_sparse_mla.register(fails)
    try:
        assert not RELEASE.self_test(module).broken
    finally:
        forget()


# The log line


@pytest.fixture
def dispatch(module: ModuleType, kernel: Kernel) -> Any:
    """A fresh seam. The lane's seam is reused after an undo, and remembers the lines that it logged."""
    (replacement,) = RELEASE.replacements[feature.GUARD_FOOLED]
    return replacement.make(module.fused_sparse_mla_absorbed, module)  # type: ignore[attr-defined]


def test_one_line_for_each_tensor_names_recipe_and_bytes(
    module: ModuleType, dispatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    query, key, _ = inputs()
    with caplog.at_level(logging.DEBUG, "megacpp_overlays"):
        for _ in range(3):
            dispatch(quantized(query), quantized(key), inputs()[2], 0.5, 512)
        RELEASE.self_test(module)
    payload = query.numel(), key.numel()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    for record, name, size in zip(caplog.records, ("query", "key"), payload, strict=True):
        assert re.fullmatch(
            rf"\[megacpp_overlays\] fp8-quantized-unwrap: the {name} of .*\.fused_sparse_mla_absorbed came as AsFloat8 "
            rf"\(AsFloat8\) of {size} bytes; dequantized to {2 * size} bytes of bfloat16 at each call, because no "
            r"FP8-aware SparseMLA took it",
            record.getMessage(),
        )


def test_the_line_says_who_took_it(dispatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    query, key, indices = inputs()

    def fp8_kernel(*_: Any) -> int:
        return 1

    forget = fp8_sparse_mla.register(fp8_kernel)
    try:
        with caplog.at_level(logging.DEBUG, "megacpp_overlays"):
            dispatch(quantized(query), key, indices, 0.5, 512)
    finally:
        forget()
    (record,) = caplog.records
    assert re.search(r"; handed as it is to .*fp8_kernel$", record.getMessage())


def test_a_call_that_upstream_declined_is_not_logged_as_a_loss_of_fp8(
    dispatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    query, key, indices = inputs()
    opened = quantized(query)
    with caplog.at_level(logging.DEBUG, "megacpp_overlays"):
        for _ in range(2):
            assert dispatch(opened, key, indices, 0.5, 64) is None
        assert opened.opened == 2  # a declined call pays for it too
        assert dispatch(opened, key, indices, 0.5, 512) is not None
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("bytes of bfloat16 at each call, but upstream declined it")
    assert second.endswith("because no FP8-aware SparseMLA took it")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_warns_and_names_itself(
    rank: int, dispatch: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline stage that is not rank 0's may have all the layers."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    query, key, indices = inputs()
    with caplog.at_level(logging.DEBUG, "megacpp_overlays"):
        dispatch(quantized(query), key, indices, 0.5, 512)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"[megacpp_overlays] rank {rank}: fp8-quantized-unwrap: the query of ")


def test_without_a_configured_log_the_line_is_on_stderr(run_python: Callable[..., Any]) -> None:
    code = (
        "from fp8_dispatch import *\n"
        "module = importlib.import_module('megatron.core.transformer.experimental_attention_variant.dsa')\n"
        "query, key, indices = inputs()\n"
        "with seam_in(module, part_of(module.__name__)), kernel_in(module, Kernel()):\n"
        "    for _ in range(2): module._fused_sparse_mla_absorbed(quantized(query), key, indices, 0.5, 512)\n"
    )
    tree = STAND_INS["sparse_mla_spring"]
    done = run_python(code, tree, SUPPORT, ROOT, after=MEGATRON, MEGACPP_OVERLAYS="off")
    lines = [line for line in done.stderr.splitlines() if "fp8-quantized-unwrap: the query of" in line]
    assert len(lines) == 1


# Behaviour that a seam must not break


@pytest.mark.unmeasured
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_it_traces_in_one_graph_where_upstream_did(module: ModuleType, seam: Any) -> None:
    query, key, indices = inputs()
    leaves = query.clone().requires_grad_(), key.clone().requires_grad_()

    def step(query: Any, key: Any) -> Any:
        return module.fused_sparse_mla_absorbed(query, key, indices, softmax_scale=0.5, v_channels=512)  # type: ignore[attr-defined]

    with kernel_in(module, TraceableKernel):
        expected = step(*leaves)
        expected.sum().backward()
        gradients = [leaf.grad.clone() for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
        compiled.sum().backward()
    assert torch.equal(compiled, expected)
    assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, gradients, strict=True))


def test_the_self_test_leaves_the_kernel_as_it_was(module: ModuleType, seam: Any) -> None:
    kernel = module.SparseMLA  # type: ignore[attr-defined] # None without tilelang
    assert not RELEASE.self_test(module).broken
    assert module.SparseMLA is kernel  # type: ignore[attr-defined]


def test_other_threads_reach_their_kernel_during_a_self_test(module: ModuleType) -> None:
    """Arming late, the witness may run while another thread is in the forward pass."""
    query, key, _ = inputs()
    results: list[Any] = []

    class Meanwhile(Kernel):
        def apply(self, *args: Any) -> Any:
            results.append(threading.current_thread().name)
            return super().apply(*args)

    original = module.fused_sparse_mla_absorbed  # type: ignore[attr-defined]

    def dispatch(*args: Any) -> Any:
        other = threading.Thread(target=lambda: call_original(query, key), name="training")
        other.start()
        other.join()
        return original(*args)

    def call_original(query: Any, key: Any) -> None:
        results.append(original(query, key, inputs()[2], 0.5, 512))

    with kernel_in(module, Meanwhile()):
        module.fused_sparse_mla_absorbed = dispatch  # type: ignore[attr-defined]
        try:
            assert RELEASE.self_test(module).broken
        finally:
            module.fused_sparse_mla_absorbed = original  # type: ignore[attr-defined]
    assert results[0] == "training"
    assert results[1].shape == (3, 2, 16, 512)


def test_other_threads_are_declined_during_a_self_test_without_a_kernel(module: ModuleType) -> None:
    original = module.fused_sparse_mla_absorbed  # type: ignore[attr-defined]
    query, key, indices = inputs()
    results: list[Any] = []

    def dispatch(*args: Any) -> Any:
        other = threading.Thread(target=lambda: results.append(original(query, key, indices, 0.5, 512)))
        other.start()
        other.join()
        return original(*args)

    with kernel_in(module, None):
        module.fused_sparse_mla_absorbed = dispatch  # type: ignore[attr-defined]
        try:
            assert RELEASE.self_test(module).broken
        finally:
            module.fused_sparse_mla_absorbed = original  # type: ignore[attr-defined]
    assert results == [None]


def test_two_self_tests_at_once_leave_the_kernel_as_it_was(module: ModuleType) -> None:
    """The second starts while the first is inside the dispatcher."""
    original = module.fused_sparse_mla_absorbed  # type: ignore[attr-defined]
    inside, late = threading.Event(), threading.Event()
    seen: list[Any] = []

    def dispatch(*args: Any) -> Any:
        seen.append(module.SparseMLA)  # type: ignore[attr-defined]
        if not inside.is_set():
            inside.set()
            late.wait(0.3)  # only a second one that does not wait sets it
        else:
            late.set()
        return original(*args)

    with kernel_in(module, None):
        module.fused_sparse_mla_absorbed = dispatch  # type: ignore[attr-defined]
        try:
            first, second = (threading.Thread(target=RELEASE.self_test, args=(module,)) for _ in range(2))
            first.start()
            assert inside.wait(HANG_S)
            second.start()
            first.join()
            second.join()
        finally:
            module.fused_sparse_mla_absorbed = original  # type: ignore[attr-defined]
        assert module.SparseMLA is None  # type: ignore[attr-defined]
    assert len(seen) == 2
