"""Probe callers of liger-kernel's fused linear cross entropy, whose output layer gets no gradient where hidden states need none.

0.6.3 raises there, and 0.6.4 to 0.7.0 with a bias; up to 0.6.2 nothing is skipped. The verdict rests on the forms of the loss in `liger_flce_none_backward`, and on the arguments of its callers.
"""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.feature_probes import liger_flce_none_backward as loss
from megacpp_overlays.model import Finding, Target, Verdict
from megacpp_overlays.source.definitions import binders, plain_function, ways_out
from megacpp_overlays.source.findings import absent, at, broken, unknown
from megacpp_overlays.source.trees import SourceTree

FUNCTION = Target("liger-kernel", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
CLASS = "LigerFusedLinearCrossEntropyLoss"
MODULE = Target("liger-kernel", "liger_kernel.transformers.fused_linear_cross_entropy", f"{CLASS}.forward")
SKIPPED = "skipped-with-the-states"
_TAKEN = {FUNCTION: ("input", "weight", "bias", "reduction"), MODULE: ("_input", "lin_weight", "bias")}


def _probe_of(target: Target) -> Callable[[SourceTree], Finding]:
    def ask(tree: SourceTree) -> Finding:
        source, passes, found = tree.module(target.module), tree.module(loss.MODULE), loss.probe(tree)
        if source is not None and (passes is None or loss.FUNCTION not in passes.text):
            plain_function(source, target.symbol)  # raises where it comes from elsewhere
        if source is None or passes is None or found.verdict is Verdict.ABSENT:
            return absent(f"there is no {target.symbol} with a choice of reduction", source)
        if "_input.requires_grad" not in passes.text:
            return absent("gradients of the output layer are computed whatever hidden states want", passes)
        function = plain_function(source, target.symbol)
        bound = [len(binders(function, each)) for each in _TAKEN[target]] if function else []
        if function is None or {*bound} != {1} or len([*ways_out(function)]) != 2:
            raise unknown(source, function, f"{target.symbol} takes other arguments, or has another way out")
        return broken(SKIPPED, at(source, function, "no gradient of the output layer where hidden states want none"))

    return ask


probe, probe_module = _probe_of(FUNCTION), _probe_of(MODULE)
