"""Probe whether the Mamba-3 MIMO backward asks TileLang for bulk copies of three axes where it supports two.

The kernels allocate shared memory with three axes. Up to tilelang 0.1.8 a bulk copy requires two and aborts the compilation; 0.1.9 takes
three. mamba-ssm as published switches TMA lowering off in every kernel. The defect needs a kernel that has it on and allocates three axes, not flat memory.

The verdict rests on the file of tilelang that lowers a bulk copy: `src/op/copy.cc` up to 0.1.9, `src/backend/cuda/op/copy.cc` in
0.1.10, `src/cuda/op/copy.cc` since; and on the decorators of the kernels.
"""

from __future__ import annotations

import ast

from megacpp_overlays.errors import SourceError
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source import forms
from megacpp_overlays.source.definitions import calls
from megacpp_overlays.source.findings import absent, at, broken, unrecognised
from megacpp_overlays.source.trees import ModuleSource, SourceTree, check_length

_PACKAGE = "mamba_ssm.ops.tilelang.mamba3"
TARGET = Target(distribution="mamba-ssm", module=f"{_PACKAGE}.mamba3_mimo_bwd", symbol="mamba_mimo_bwd_bwd")
TWO_AXES_ONLY = "two-axes-only"

_MODULES = (TARGET.module, f"{_PACKAGE}.mamba3_mimo_bwd_varlen")
_SWITCH = "TL_DISABLE_TMA_LOWER"
_AS_PUBLISHED = f"@tilelang.jit(out_idx=[],pass_configs={{tilelang.PassConfigKey.{_SWITCH}:True,"
"""The decorator of every kernel in 2.3.2.post1 and main, without spaces."""


def probe(tree: SourceTree) -> Finding:
    """Return whether a kernel needs a bulk copy that TileLang cannot compile."""
    kernels = [source for name in _MODULES if (source := tree.module(name)) is not None]
    if not kernels:
        return absent(f"there is no {TARGET.module}")
    if tree.module("tilelang") is None:
        return absent("there is no tilelang")
    copies = forms.known("tilelang-bulk-copy-rank", TARGET, tree)
    if copies is not None and copies.verdict is Verdict.FIXED:
        return copies
    on_kernels = [found for source in kernels for found in _switched_on(source)]
    on = [seen for _, seen in on_kernels]
    if not on:
        return absent("every kernel switches TMA lowering off", kernels[0])
    if not any(_has_three_axes(node) for node, _ in on_kernels):
        return unrecognised(*on, Evidence(seen="none of these is known to keep shared memory with three axes"))
    if copies is None:
        return unrecognised(*on, Evidence(seen="how tilelang lowers a bulk copy was not read"))
    return broken(TWO_AXES_ONLY, *on, *copies.evidence)


def _switched_on(source: ModuleSource) -> list[tuple[ast.FunctionDef, Evidence]]:
    """Return the kernels of a module that do not switch TMA lowering off.

    Raises:
        SourceError: there is no kernel, one has no options that can be read, or the text is longer than the limit.
    """
    check_length(source.path, source.text)
    text = "".join(source.text.split())
    if 0 < text.count("@tilelang.jit(") == text.count(_AS_PUBLISHED):
        return []  # as published; parsing 70 kilobytes takes longer than the rest of a start
    kernels = [
        (node, decorator)
        for node in source.syntax.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in {"tilelang.jit", "jit"}
    ]
    if not kernels:
        raise SourceError(f"{source.path}: there is no function under tilelang.jit")
    on = [node for node, how in kernels if not _is_off(source, how)]
    return [(node, at(source, node, f"{node.name} has TMA lowering on")) for node in on]


def _has_three_axes(kernel: ast.FunctionDef) -> bool:
    """Return whether a kernel keeps shared memory with three axes, as `mamba_mimo_bwd_bwd` of 2.3.2.post1 does."""
    shapes = [call.args[0] for call in calls(kernel, "alloc_shared") if call.args]
    return any(isinstance(each, ast.List | ast.Tuple) and len(each.elts) == 3 for each in shapes)


def _is_off(source: ModuleSource, decorator: ast.Call) -> bool:
    options = next((each.value for each in decorator.keywords if each.arg == "pass_configs"), None)
    if options is None:
        return False  # on is the default
    if not isinstance(options, ast.Dict):
        raise SourceError(f"{source.path}:{decorator.lineno}: pass_configs is no dict of literals")
    for key, value in zip(options.keys, options.values, strict=True):
        name = "" if key is None else ast.unparse(key)
        if name.endswith(f".{_SWITCH}") or "tma_lower" in name:
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                return value.value
            raise SourceError(f"{source.path}:{value.lineno}: {_SWITCH} is no literal")
    return False
