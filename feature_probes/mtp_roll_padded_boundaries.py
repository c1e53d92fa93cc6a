"""Probe `roll_tensor` of multi-token prediction for the boundaries between which it rolls documents of a packed row.

Where documents are padded, `cu_seqlens_q` counts their tokens and `cu_seqlens_q_padded` says where they lie. From the second
document on a roll between the former takes labels and masks of neighbours, and zeros in the midst of documents.

    up to 0.15.3            a roll knows no packed rows: ABSENT
    0.16.0 and newer, main  `_roll_tensor_packed_seq` rolls between `cu_seqlens_q`: BROKEN
    dev since 2026-05-12    between `cu_seqlens_q_padded` where it is given: FIXED

The seam surrounds `_roll_tensor_packed_seq`, and gives it the padded boundaries for those that it reads. So its body must be
one that reads no others, `roll_tensor` must hand the parameters over as every known one does, and they must have both fields.

Source: https://github.com/NVIDIA/Megatron-LM/pull/4494
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes import packed_params
from megacpp_overlays.feature_probes.definitions import plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import judged, table
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource, SourceTree

ROLL = "roll_tensor"
PACKED = "_roll_tensor_packed_seq"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.multi_token_prediction", symbol=PACKED)
UNPADDED = "unpadded-boundaries"

_PADDED_FIELD = "cu_seqlens_q_padded"
_PACKED_BODIES = {
    "e8131b7ee76ed0d3": "0.16.0 and 0.16.1",
    "0e030fb49c256f30": "0.17.0 to 0.19.2, main until 2026-08-22",
    "a17596c7fb44f3b4": "main of 2026-08-22: the sum may be left out",
    "4e9b5bd859f8ee09": "pull request 6746 of 2026-08-21: neighbours are asked in the group of context parallelism",
}
"""Fingerprints of `_roll_tensor_packed_seq` that read `cu_seqlens_q` and nothing else of the parameters."""
_ROLL_BODIES = {
    "6d3c0bd39ae003d7": "0.16.0 to 0.18.2",
    "683ac824d5929083": "0.19.0 to 0.19.2, main until 2026-08-22",
    "a7c0bb523246e43d": "main of 2026-08-22",
    "3d99fbce7d89e801": "pull request 6746 of 2026-08-21",
}
"""Fingerprints of `roll_tensor` that hand packed rows over first, with the parameters of their caller."""

_PLACES = (f"{TARGET.module}:{ROLL}", f"{TARGET.module}:{PACKED}")
_REPAIRED = table(
    _PLACES,
    {
        "dev ab5ab5d84f (2026-05-12)": "5c24e00929869b81 fae86a66f28beca1",
        "dev 2f1004963d (2026-06-09)": "6d035ae7ee291cc6 fae86a66f28beca1",
        "dev 056d9c0f24 (2026-06-26)": "2d6d46803d0ad82e c5df53dd09bc965b",
        "dev 244316c655 (2026-07-09)": "94ba98cdd7c0a513 31b9e93ad4d8c8ab",
        "dev cae55c1f09 (2026-08-10) to d48bd6be0a": "73173959994c7fa3 -",
    },
)
"""Every commit of dev with the repair, by the first that has it so."""


def probe(tree: SourceTree) -> Finding:
    """Return whether a packed row is rolled between boundaries that count no padding."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    packed, roll = plain_function(source, PACKED), plain_function(source, ROLL)
    if roll is None:
        if packed is not None:
            raise unknown(source, packed, f"there is {PACKED}, and no {ROLL} that calls it")
        return absent(f"defines no {ROLL}", source)
    if packed is None:
        return _without_packed(tree, source, roll)
    if _PADDED_FIELD in words(packed):
        return judged(tree, _REPAIRED, at(source, packed, f"{PACKED} knows {_PADDED_FIELD}"), places=_PLACES)
    for function, name, known in ((packed, PACKED, _PACKED_BODIES), (roll, ROLL, _ROLL_BODIES)):
        if (body := fingerprint(function)) not in known:
            raise unknown(source, function, f"{name} has an unknown body {body}")
        if change := next(iter(source.bindings.changes(name)), None):
            raise unknown(source, change, f"{name} is changed outside its definition")
    params = tree.module(packed_params.MODULE)
    if params is None:
        raise unknown(source, None, f"there is no module {packed_params.MODULE}")
    packed_params.data_class(params, optional=("cu_seqlens_q", _PADDED_FIELD))
    return broken(
        UNPADDED, at(source, packed, "a packed row is rolled between cu_seqlens_q, wherever its documents lie")
    )


def _without_packed(tree: SourceTree, source: ModuleSource, roll: ast.FunctionDef) -> Finding:
    """Return what is said of a module that has no function for packed rows."""
    if "packed_seq_params" not in words(roll):
        if _PADDED_FIELD in source.text:
            raise unknown(source, roll, f"{ROLL} takes no packed rows, and {_PADDED_FIELD} is mentioned")
        return absent(f"{ROLL} takes no packed rows", source)
    if _PADDED_FIELD in source.text:
        return judged(tree, _REPAIRED, at(source, roll, f"{ROLL} has another way for packed rows"), places=_PLACES)
    raise unknown(source, roll, f"{ROLL} takes packed rows, and there is no {PACKED}")
