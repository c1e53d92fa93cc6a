"""Attention of transformers with the overlay: the backends that it may choose from, with the functions of released transformers.

Gradients need a GPU, see `tests/gpu/test_cudnn_sdpa_query_gradient.py`. Here calls on one are stood in for, up to the place where upstream looks at the layer.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import assert_self_test, placed
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacpp_overlays.feature_probes.cudnn_sdpa_query_gradient import AS_TORCH_PREFERS, TARGET
from megacpp_overlays.loader import probing
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays import cudnn_sdpa_query_gradient as overlay
from megacpp_overlays.source.file_trees import ArchiveTree

pytestmark = pytest.mark.upstream

MATH, FLASH, EFFICIENT, CUDNN = (SDPBackend(number) for number in range(4))
OTHERS = {MATH, FLASH, EFFICIENT}
ALL = {*OTHERS, CUDNN}


@pytest.fixture(params=["5.23.0", "5.24.0"], scope="module")
def stock(request: pytest.FixtureRequest, wheel: Callable[[str, str], Path]) -> Iterator[ModuleType]:
    """The functions of a release, in a module of their own: transformers itself needs more than this environment has."""
    tree = ArchiveTree(wheel("transformers", request.param))
    assert probing.examine(overlay.OVERLAY, tree).verdict is Verdict.BROKEN
    source = tree.module(TARGET.module)
    assert source is not None
    functions = [each for each in source.syntax.body if isinstance(each, ast.FunctionDef)]
    future = ast.parse("from __future__ import annotations").body
    found = ModuleType("attention_of_a_release")
    flags = ("xpu_available", "npu_available", "mps_available")
    vars(found).update({f"_is_torch_{each}": False for each in flags}, torch=torch, os=os, PagedAttentionCache=int)
    vars(found).update(logger=logging.getLogger(), is_torchdynamo_compiling=torch.compiler.is_compiling)
    exec(compile(ast.Module([*future, *functions], []), source.path, "exec"), vars(found))
    sys.modules[found.__name__] = found  # Dynamo looks it up
    yield found
    del sys.modules[found.__name__]


@pytest.fixture
def module(stock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The functions with the seam, in a process that has not queried cuDNN. This host has none that runs."""
    monkeypatch.setattr(overlay, "_known", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with placed(overlay.OVERLAY, AS_TORCH_PREFERS, stock):
        yield stock
    torch._dynamo.reset()


def test_the_self_test_sees_the_defect_and_its_absence(stock: ModuleType) -> None:
    assert_self_test(overlay.OVERLAY, stock, AS_TORCH_PREFERS)
    with placed(overlay.OVERLAY, AS_TORCH_PREFERS, stock), torch.inference_mode(), sdpa_kernel(MATH):
        assert not overlay.OVERLAY.self_test(stock).broken
    assert not overlay._known


def chosen_from(module: ModuleType, queries: int = 192, keys: int = 192, mask: Any = True, **asked: Any) -> set[Any]:
    """Return the backends that a call on a GPU may choose from; attributes of its tensors and arguments may be given."""
    seen: set[Any] = set()

    class Layer:
        is_causal = True

        def __getattr__(self, name: str) -> Any:
            seen.update(each for each in torch.nn.attention._cur_sdpa_kernel_backends() if each in ALL)
            raise InterruptedError

    more = {name: asked.pop(name) for name in ("is_causal", "position_bias") if name in asked}
    of_tensors = {"is_nested": False, "requires_grad": True, "dtype": torch.bfloat16, "device": torch.device("cuda", 0)}
    query, key = (SimpleNamespace(shape=(1, 2, each, 64), **of_tensors | asked) for each in (queries, keys))
    with pytest.raises(InterruptedError):
        getattr(module, TARGET.symbol)(Layer(), query=query, key=key, value=key, attention_mask=mask, **more)
    return seen


FEW: list[dict[str, Any]] = [{"keys": 64}, {"queries": 1, "mask": None}, {"queries": 1, "keys": 128}]
FEW += [{"mask": None, "is_causal": False}, {"mask": None, "position_bias": True}]
OTHER: list[dict[str, Any]] = [{"keys": 256}, {"keys": 200}, {"queries": 1, "keys": 97}, {"mask": None}]
OTHER += [{"dtype": torch.float32}, {"device": torch.device("cpu")}, {"is_nested": True}, {"requires_grad": False}]


@pytest.mark.parametrize(("asked", "expected"), [(each, OTHERS) for each in FEW] + [(each, ALL) for each in OTHER])
def test_cudnn_is_left_out_where_it_may_fail_alone(module: ModuleType, asked: Any, expected: set[Any]) -> None:
    assert chosen_from(module, **asked) == expected
    with torch.no_grad():
        assert chosen_from(module, **asked) == ALL
    assert not any(overlay._known.values())


@pytest.mark.parametrize("backends", [[CUDNN], [CUDNN, FLASH], [EFFICIENT, MATH], [CUDNN, FLASH, MATH]])
def test_backends_that_the_user_switched_off_stay_off(module: ModuleType, backends: list[Any]) -> None:
    """Without math there may be none that takes the call."""
    with sdpa_kernel(backends):
        assert chosen_from(module) == set(backends) - ({CUDNN} if MATH in backends else set())


def test_numbers_are_those_of_autocast(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    for dtype, expected in ((torch.float16, OTHERS), (torch.float32, ALL)):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda _, dtype=dtype: dtype)
        assert chosen_from(module, dtype=torch.float32) == expected


def test_cudnn_is_asked_once_and_stays_where_it_is_right(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def is_finite(kernel: Any, *_: object) -> bool:
        asked.append(kernel.queries)
        return bool(kernel.queries > 1)

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(overlay, "_is_finite", is_finite)
    for is_capturing in (True, False, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_capturing=is_capturing: is_capturing)
        assert chosen_from(module) == (OTHERS if is_capturing else ALL)
        assert chosen_from(module, queries=1) == OTHERS
        assert asked == ([] if is_capturing else [64, 64, 1])


def test_a_compiled_graph_serves_all_lengths_at_which_cudnn_may_fail(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[str] = []
    layer = torch.nn.Module()

    def attended(of: torch.Tensor) -> Any:
        return getattr(module, TARGET.symbol)(layer, of, of, of, None, is_causal=False)[0]

    def keep(graph: Any, _: object) -> Any:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(attended, fullgraph=True, dynamic=True, backend=keep)
    given = [
        torch.randn(1, 2, rows, 16, dtype=torch.bfloat16, requires_grad=True) for rows in (192, 320, 448, 256, 200)
    ]
    expected = [attended(each) for each in given]
    for device in ("cuda", "cpu"):  # the CPU as a device without the defect, and then as one with it
        monkeypatch.setattr(overlay, "_DEVICE", device)
        assert all(torch.equal(compiled(each), right) for each, right in zip(given, expected, strict=True))
    assert ["CUDNN" in each for each in graphs] == [False, True, False]
