"""Reads of packed sequence lengths from the host, in a captured forward pass of the gated delta net.

With packed sequences `forward` resolves `cu_seqlens` twice, for queries and for keys, and each time reads the last entry and the
divisibility by the context-parallel size from the host; then it asserts that `torch.equal` holds for the two. 0.18.0 to 0.18.2
and trees up to 2026-07-08 have it in one file, 0.19.x, main and dev in a base class. Earlier releases refuse packed sequences.
No repair has been seen yet.

The verdict rests on the method, on its class, and on each forward pass that calls it.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.findings import absent
from megacpp_overlays.source.trees import SourceTree

_ID = "gdn-capture-gates"
_PACKAGE = "megatron.core.ssm.gated_delta_net"
SINGLE = Target(distribution="megatron-core", module=_PACKAGE, symbol="GatedDeltaNet._resolve_cu_seqlens")
COMMON = Target(distribution="megatron-core", module=f"{_PACKAGE}.common", symbol="_GDNBase._resolve_cu_seqlens")

_CLASS, _BASE = "GatedDeltaNet", "_GDNBase"
READ_LENGTHS = "packed-lengths-read-on-host"


def probe_single(tree: SourceTree) -> Finding:
    """Return whether a gated delta net in one file reads packed lengths from the host."""
    package, common = tree.module(SINGLE.module), tree.module(COMMON.module)
    has_base = common is not None and bool(common.bindings.definitions(_BASE))
    if has_base and package is not None and not package.bindings.definitions(_CLASS):
        return absent(f"{_CLASS} is in a module of its own", package)
    return forms.finding(_ID, SINGLE, tree)


def probe_common(tree: SourceTree) -> Finding:
    """Return whether the base class of the gated delta nets reads packed lengths from the host."""
    return forms.finding(_ID, COMMON, tree)
