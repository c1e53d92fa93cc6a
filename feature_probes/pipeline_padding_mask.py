"""Probe `GPTModel` for padding masks that are cut for sequence parallelism on the first pipeline stage alone, or for another group.

`_preprocess` cuts the mask where it embeds tokens: on the first stage. Those behind it have a shard of the tokens and the whole mask, and
their MoE routers end in an error. And it cuts for the ranks of the process's default group, whatever groups the model was given.

    up to 0.15.3            takes no padding mask: ABSENT
    0.16.0 to 0.19.2, main  cuts on the first stage alone: BROKEN
    dev                     the MoE layer cuts what is too long, and all of it is for the default group: BROKEN

No tree has a repair: #5563 was closed, #5088 is open. One that cuts outside of the branch that embeds looks repaired.

The seam cuts the mask where it is as long as all shards together, and puts it where `_preprocess` returns it. So that method must be one
that was read, with the `forward` that unpacks what it returns.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5563
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes.definitions import calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import SourceTree

MODEL = "GPTModel"
PREPROCESS = f"{MODEL}._preprocess"
FORWARD = f"{MODEL}.forward"
TARGET = Target(distribution="megatron-core", module="megatron.core.models.gpt.gpt_model", symbol=PREPROCESS)
FIRST_STAGE = "cut-on-the-first-stage"
DEFAULT_GROUP = "cut-for-the-default-group"

_MASK = "padding_mask"
_CUT = "scatter_to_sequence_parallel_region"
_PLACES = (f"{TARGET.module}:{PREPROCESS}", f"{TARGET.module}:{FORWARD}")
_KNOWN = {
    "e78a7dc09c106814 c8524425c03de222": (FIRST_STAGE, "0.16.0 and 0.16.1"),
    "e78a7dc09c106814 01569c749ee05593": (FIRST_STAGE, "0.17.0 and 0.17.1"),
    "c0685cd1901a8967 072021a8f5769bb4": (FIRST_STAGE, "0.18.0 to 0.18.2"),
    "dc38344db0722b82 072021a8f5769bb4": (FIRST_STAGE, "0.19.0 to 0.19.2, main until 2026-08-10"),
    "dc38344db0722b82 0fc1c39b5eb4af78": (FIRST_STAGE, "main of 2026-08-11 to 2026-08-22"),
    "d4410c1c837025b7 a63870ed39afb054": (DEFAULT_GROUP, "dev of 2026-07-27 to 2026-08-21"),
}
"""Shapes, and where the bodies of both methods were read together."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether the mask is cut on the first stage alone."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    if plain_class(source, MODEL) is None:
        return absent(f"defines no {MODEL}", source)
    method, forward = plain_function(source, PREPROCESS), plain_function(source, FORWARD)
    meant = [meaning(tree, where) for where in _PLACES]  # what cannot be read may be anything, and is not absent
    if method is None or forward is None or _MASK not in words(method):
        if _MASK in source.text:
            raise unknown(source, method, f"{PREPROCESS} takes no {_MASK}, and the module knows one")
        return absent(f"{MODEL} takes no {_MASK}", source)
    bodies = f"{fingerprint(method)} {fingerprint(forward)}"
    if bodies in _KNOWN:
        shape, read_in = _KNOWN[bodies]
        if any(each.startswith("(") for each in meant):
            raise unknown(source, method, f"{PREPROCESS} or {FORWARD} does not stand alone: {', '.join(meant)}")
        return broken(shape, at(source, method, f"a padding mask is cut where tokens are embedded, as in {read_in}"))
    if any(_MASK in words(each) and calls(each, _CUT) for each in method.body if not _embeds(each)):
        seen = "a padding mask is cut where no token is embedded"
        return judged(tree, _REPAIRED, at(source, method, seen), places=_PLACES)
    raise unknown(source, method, f"nobody read {PREPROCESS} and {FORWARD} {bodies}")


def _embeds(node: ast.AST) -> bool:
    """Return whether a statement embeds tokens."""
    return bool(calls(node, "embedding"))
