"""The sums of the Mamba-3 MIMO backward, and whether TileLang refuses one of them.

tilelang 0.1.13 (tile-ai/tilelang#2424) refuses to lower a sum where it cannot prove that what a thread holds of it is the same
for every thread. `mamba_mimo_bwd_bwd` has such sums, in the plain and in the variable-length form, so that it does not
compile any more; up to 0.1.12 they were lowered, and right. Both are known by their text: modules that nobody compiled
with that check are UNRECOGNISED, as their host functions may call something else, and so is a check that nobody read.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes import cpp_source, tilelang_sums
from megacpp_overlays.feature_probes.findings import absent, at, broken, fixed
from megacpp_overlays.model import Evidence, Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint, is_docstring
from megacpp_overlays.source.trees import SourceTree

_PACKAGE = "mamba_ssm.ops.tilelang.mamba3"
TARGET = Target(distribution="mamba-ssm", module=f"{_PACKAGE}.mamba3_mimo_bwd", symbol="mamba_mimo_bwd_bwd")
REFUSED = "sum-refused"

_REFUSING = {"0.1.13", "0.1.14", "0.1.15"}
_TAKING = {"0.1.8", "0.1.9", "0.1.10", "0.1.11", "0.1.12"}
_KERNEL = "mamba_mimo_bwd_bwd"
_KERNELS = {
    TARGET.module: {"9d7ed0d7161170b5": "2.3.2.post1", "191664458ff4036b": "main e9594ce"},
    f"{_PACKAGE}.mamba3_mimo_bwd_varlen": {"21a6cafc2c5af436": "2.3.2.post1", "39d2011f3dcd3498": "main e9594ce"},
}
"""Fingerprints of the modules with the kernels, docstrings aside."""
_WHOLE = {
    "76d0146c3c800f80": "2.3.2.post1",
    "3f025e0dc2932fd4": "2.3.2.post1",
    "f35e610f6c5c6fdf": "main e9594ce",
    "f62798655442605d": "main e9594ce",
}
"""The same by the text of the whole module: a gate is read at start-up, and parsing two of them takes 100 ms."""


def probe(tree: SourceTree) -> Finding:
    """Return whether the backward pass of Mamba-3 MIMO compiles."""
    if tree.module(TARGET.module) is None:
        return absent(f"there is no {TARGET.module}")
    if tree.module("tilelang") is None:
        return absent("there is no tilelang")
    sums = tilelang_sums.read(tree)
    if sums.release in _TAKING:
        seen = Evidence(seen=f"sums of this layout are lowered, as in {sums.release}", file=sums.file.path)
        return fixed(seen, repair=[sums.text])
    if sums.release not in _REFUSING:
        raise sums.unknown()
    kernels = [_kernel(tree, module, known) for module, known in _KERNELS.items()]
    return broken(REFUSED, cpp_source.at(sums.file, tilelang_sums.CHECK, f"refused as in {sums.release}"), *kernels)


def _kernel(tree: SourceTree, module: str, known: Mapping[str, str]) -> Evidence:
    """Return evidence of a kernel that is known not to compile.

    Raises:
        SourceError: it is missing, or another one.
    """
    source = tree.module(module)
    if source is not None and (text := source.sha256[:16]) in _WHOLE:
        return cpp_source.at(source, f"def {_KERNEL}(", f"{_KERNEL} as in {_WHOLE[text]}")
    function = None if source is None else source.function(_KERNEL)
    if source is None or function is None:
        raise SourceError(f"there is no {_KERNEL} in {module}")
    if (seen := fingerprint([each for each in source.syntax.body if not is_docstring(each)])) not in known:
        raise SourceError(f"{source.path}:{function.lineno}: {_KERNEL} is in an unknown text {seen}")
    return at(source, function, f"{_KERNEL} as in {known[seen]}")
