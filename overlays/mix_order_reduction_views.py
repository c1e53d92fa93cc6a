"""Exclusion of reductions from Inductor's mixed-order fusion where it would lose a result that is a view of another tensor.

Inductor computes a reduction over rows and one over columns in one kernel, and binds the second result to a new name. A result that is a view of another tensor, such as one of
several that are concatenated, is never written there: the parameter's gradient is uninitialised memory. Here such a pair is not fused. Upstream decides on every other pair.
Compiled graphs have their own keys in torch's caches, so that no graph is loaded that was compiled without this overlay.

Source: https://github.com/pytorch/pytorch/issues/193061
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mix_order_reduction_views as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread

_MARK = b"mix-order-reduction-views"
"""Suffix of the data from which torch computes keys of its caches of compiled graphs."""


def _make(original: Callable[..., bool], module: ModuleType) -> Callable[..., bool]:
    def can_fuse(cls: Any, node1: Any, node2: Any) -> bool:
        if any(_writes_parts(module, node) for node in (node1, node2)):
            second = node2 if cls.is_contiguous_node(node1) else node1  # the one whose result is bound anew
            if _writes_parts(module, second):
                return False
        return original(cls, node1, node2)

    return can_fuse


def _added(original: Callable[..., bool], module: ModuleType) -> Callable[..., bool]:
    def sub_node_can_fuse(self: Any, node1: Any, node2: Any, other_nodes: Any) -> bool:
        if node1 is self.node2 and _writes_parts(module, node2):
            return False
        return original(self, node1, node2, other_nodes)

    return sub_node_can_fuse


def _writes_parts(module: ModuleType, node: Any) -> bool:
    """Return whether a reduction of a node has a result with its place in another tensor."""
    if not node.is_reduction():
        return False
    return any(
        isinstance(getattr(buffer.node, "layout", None), module.ir.NonOwningLayout)
        for each in node.get_nodes()
        if each.is_reduction()
        for buffer in _results(each)
    )


def _results(reduction: Any) -> Iterator[Any]:
    """Yield the buffers that a reduction writes, and those of the second half of a split one."""
    for buffer in reduction.get_outputs():
        yield buffer
        for user in buffer.users:
            if user.node.get_name() != "OUTPUT" and user.node.is_reduction():
                yield from user.node.get_outputs()


def _of_their_own(original: Callable[[Any, Any], bytes], _module: ModuleType) -> Callable[[Any, Any], bytes]:
    def dumps(self: Any, obj: Any) -> bytes:
        return original(self, obj) + _MARK

    return dumps


def observe(module: ModuleType) -> Observation:
    """Call `can_fuse` for two reductions, the second of which writes a part of a tensor, and observe whether upstream's method runs."""
    asked: list[bool] = []

    class Graph:
        """A graph that fuses nothing."""

        @property
        def cpp_wrapper(self) -> bool:
            asked.append(True)
            return True

    part = SimpleNamespace(node=SimpleNamespace(layout=object.__new__(module.ir.NonOwningLayout)), users=())
    reads = SimpleNamespace(reads=())
    second = SimpleNamespace(is_reduction=lambda: True, get_outputs=lambda: [part], read_writes=reads)
    second.get_nodes = lambda: [second]
    first = SimpleNamespace(is_reduction=lambda: True, get_outputs=list, read_writes=reads)
    first.get_nodes = lambda: [first]
    with module.V.set_graph_handler(Graph()):
        getattr(module, feature.CLASS).can_fuse(first, second)
    seen = "may be fused" if asked else "is not fused"
    return Observation(broken=bool(asked), seen=f"a reduction that writes a part of a tensor {seen} as a second one")


def observe_key(module: ModuleType) -> Observation:
    """Read the data from which torch computes the key of an empty input."""
    pickler = SimpleNamespace(dump=lambda _: None, _stream=io.BytesIO())
    is_own = getattr(module, feature.PICKLER).dumps(pickler, None).endswith(_MARK)
    return Observation(
        broken=not is_own, seen=f"keys of compiled graphs {'say' if is_own else 'do not say'} how reductions are fused"
    )


def _part(
    target: Target,
    probe: Callable[..., Any],
    shape: str,
    check: Callable[[ModuleType], Observation],
    **seams: Callable[..., Any],
) -> Overlay:
    return Overlay(
        id="mix-order-reduction-views",
        pack=62,
        title="leave reductions unfused whose result Inductor would lose",
        target=target,
        probe=probe,
        replacements={shape: tuple(Replacement(symbol=symbol, make=make) for symbol, make in seams.items())},
        unsupported={},
        witness=None,  # where a setting switches the fusion off there is nothing to see
        self_test=check,
        opt_in=False,
        needs_parts=() if target == feature.CACHE else (feature.CACHE.module,),
        symptoms=(
            "gradients of a scale and shift table are garbage with torch.compile",
            "AdaLN trains in eager mode and not with torch.compile",
            "gradient norm of a scale_shift_table grows step by step",
        ),
        concerns="every model",
        breaks="torch.compile never writes gradients of slices of one parameter that scale and shift several norms, as in AdaLN, once reductions are large: "
        "they are uninitialised memory",
        retire_when="the second result of a kernel of two orders is copied to its place",
        brief="reductions of two orders",
        until="torch is 2.15.0 or newer",
        threads=(
            Thread(repository="pytorch/pytorch", number=193061, state="closed, right in 2.15.0"),
            Thread(repository="pytorch/pytorch", number=193103, state="closed, right in 2.15.0"),
        ),
        last_validated="2026-11-28, H200, driver 580.159.04: torch 2.11.0; 2.11.0 to 2.15.0 read",
    )


PARTS = (
    _part(
        feature.TARGET,
        feature.probe,
        feature.BOUND_ANEW,
        observe,
        **{feature.TARGET.symbol: _make, feature.ADDED: _added},
    ),
    _part(feature.CACHE, feature.probe_cache, feature.CACHED, observe_key, **{feature.CACHE.symbol: _of_their_own}),
)
