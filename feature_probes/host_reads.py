"""Calls in a function that read device values from the host.

Shared by the probes of the CUDA-graph overlays. A call that reads needs the value on the host before the next line
runs; while a stream is captured it raises.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megacpp_overlays.feature_probes.definitions import called, calls
from megacpp_overlays.source.trees import FunctionNode

READS = frozenset(
    {"all", "allclose", "any", "bool", "cpu", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy"}
    | {"tensor", "tolist", "unique"}
)
"""Names of calls that read, or may: `all` and `any` do where an `if` asks them, `tensor` copies from the host."""


def reads(function: FunctionNode) -> Iterator[ast.Call]:
    """Yield the calls in a function that read from the host, or may."""
    return (call for call in calls(function) if called(call) in READS)
