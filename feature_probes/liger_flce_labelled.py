"""Probe the fused linear cross entropy of liger-kernel for the cost of tokens without a label.

Every token goes through the output layer, and its gradient of zeros through both products behind it: a step takes as long for a tenth of the
labels as for all. The kernel returns at once for an ignored token, with logits of zero, and the products of those zeros follow.

The seam takes the place of the whole function, so a release is one that was read only where all parts that define
the loss, its gradients and its further outputs are: those by which `liger_flce_none_backward` knows the releases from 0.8.2
on. Before them the same parts are only read for gradients per token.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes import liger_flce_none_backward as per_token
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source.findings import absent, at, broken, finding_of, unknown, unrecognised
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(distribution="liger-kernel", module=per_token.MODULE, symbol=per_token.FUNCTION)
EVERY_TOKEN = "every-token"  # noqa: S105 - no password
"""All tokens are computed, in a release whose contract was read."""
OLDER = "older"
"""All tokens are computed, in a release before gradients per token."""


def probe(tree: SourceTree) -> Finding:
    """Return whether tokens without a label go through the products of the fused linear cross entropy."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    core = source.function(per_token.CORE_FORWARD)
    found = finding_of(per_token.probe, tree)
    if found.verdict is Verdict.UNRECOGNISED:
        return unrecognised(*found.evidence)
    forward = core or source.function(f"{per_token.FUNCTION}.forward")
    if forward is None:
        raise unknown(source, None, f"{per_token.CORE_FORWARD} is missing")
    every = at(source, forward, "every token goes through the products, labelled or not")
    if found.verdict is Verdict.FIXED:
        return broken(EVERY_TOKEN, every, *found.evidence[-1:])
    return broken(OLDER, every, Evidence(seen="gradients are not computed per token"))
