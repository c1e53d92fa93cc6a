"""Cast of fp32 parameters by `Float16Module`.

Releases 0.13.0 to 0.19.2 cast every parameter. Main since 2026-08-10 and dev since 2026-07-09 leave alone whatever
carries `keep_in_fp32`; nothing marks Mamba-3, so its parameters are cast all the same. No release of mamba-ssm marks them, so no tree is FIXED.

An unrepaired optimizer saves a model with some fp32 parameters under wrong names, without an error; upstream's rounding
is the lesser harm. So both optimizers must be known to save fp32 parameters, repaired or by themselves.

The verdict rests on all of `Float16Module`, which no other code in its module may change, on its conversion functions, on both optimizers,
and on a Mamba-3 without marks.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5929 (main) and https://github.com/NVIDIA/Megatron-LM/pull/5308 (dev) for the marks.
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes import float16_distributed_order, float16_optimizer_state_ids
from megacpp_overlays.fp32_marks import MAMBA3, MARK
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source import forms
from megacpp_overlays.source.findings import finding_of, unknown, unrecognised
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.module", symbol="Float16Module")

BLANKET_CAST, MARKS_HONOURED = "blanket-cast", "marks-honoured"
_ABSENT_WITHOUT = {f"{TARGET.module}:{TARGET.symbol}": f"defines no {TARGET.symbol}"}


def probe(tree: SourceTree) -> Finding:
    """Return whether `Float16Module` casts fp32 parameters."""
    found = forms.finding("float16-fp32-exemption", TARGET, tree, _ABSENT_WITHOUT)
    mamba3 = tree.module(MAMBA3.rpartition(".")[0]) if found.shape == MARKS_HONOURED else None
    if mamba3 is not None and MARK in mamba3.text:
        raise unknown(mamba3, None, f"mentions {MARK}, and no mamba-ssm that does was read")
    if found.verdict is Verdict.BROKEN:
        _check_not_handed_on(tree)
        for optimizer in (float16_optimizer_state_ids.probe, float16_distributed_order.probe):
            known = finding_of(optimizer, tree)
            if known.verdict is Verdict.UNRECOGNISED or _is_elsewhere(known):
                why = Evidence(seen="fp32 parameters may be saved under wrong names here: an optimizer is not known")
                return unrecognised(*found.evidence, why, *known.evidence)
    return found


def _check_not_handed_on(tree: SourceTree) -> None:
    """Check that nothing else in its module is done with the class, such as `patch(Float16Module)`: no digest would tell."""
    source = tree.module(TARGET.module)
    assert source is not None  # noqa: S101 - its digest was compared
    inside = {id(node) for node in ast.walk(source.find(TARGET.symbol) or source.syntax)}
    for node in ast.walk(source.syntax):
        if isinstance(node, ast.Name) and node.id == TARGET.symbol and id(node) not in inside:
            raise unknown(source, node, f"{TARGET.symbol} is used outside its class")


def _is_elsewhere(known: Finding) -> bool:
    """Return whether the module of an optimizer is there without its class, which something else must define then."""
    return known.verdict is Verdict.ABSENT and any(each.file for each in known.evidence)
