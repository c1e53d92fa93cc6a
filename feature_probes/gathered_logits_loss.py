"""Probe Megatron's language models for a loss that takes gathered logits for a rank's share of the vocabulary.

`parallel_output=False` and `runtime_gather_output=True` give each tensor parallel rank the logits of all classes. With labels those go to a cross
entropy over shares of the vocabulary, which counts all classes once for each rank, and looks for labels of other ranks at the wrong places.

    up to 0.3.0                    models have no such method: ABSENT
    0.4.0 to 0.13.1                not read: UNRECOGNISED
    0.14.0 to 0.19.2, main, dev    taken for a share: BROKEN

No tree has a repair. The seam gives the method a rank's share of gathered logits, so what it does with logits must be as it was read.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.known_bodies import check_known
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

CLASS = "LanguageModule"
METHOD = f"{CLASS}.compute_language_model_loss"
TARGET = Target(
    distribution="megatron-core", module="megatron.core.models.common.language_module.language_module", symbol=METHOD
)
MAPPINGS = "megatron.core.tensor_parallel.mappings"
TAKEN_FOR_A_SHARE = "taken-for-a-share"

_PLACES = (f"{TARGET.module}:{METHOD}",)
_KNOWN = {
    "8d75032e37093f8d": "0.14.0",
    "ff88489940b2464f": "0.15.0 to 0.15.3",
    "f428ace17830d17f": "0.16.0 and 0.16.1",
    "62afec90197c9716": "0.17.0 and 0.17.1",
    "1a68b0e659fd9942": "0.18.0 to 0.18.2",
    "e46738c0d1b6e281": "0.19.0 to 0.19.2, main d98e8a64dd and dev d48bd6be0a",
}
"""What the method is."""
_SPLITS = {
    "_ScatterToModelParallelRegion": {"d4eb615e0ab1e609"},
    "_split_along_last_dim": {"2a227db111253694"},
    "_gather_along_last_dim": {"da9d2c2105ca5cce"},
}
"""What the seam splits logits with, and what gathers their gradient."""
_SHARES = {
    "scatter_to_tensor_model_parallel_region",
    "split_tensor_along_last_dim",
    "vocab_size",
    "_split_along_last_dim",
}
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether gathered logits are taken for a share."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    if plain_class(source, CLASS) is None:
        return absent(f"defines no {CLASS}", source)
    method = plain_function(source, METHOD)
    if method is None:
        raise unknown(source, None, f"{CLASS} has no {METHOD.rpartition('.')[2]}")
    if words(method) & _SHARES:
        return judged(tree, _REPAIRED, at(source, method, f"{METHOD} asks whether logits are shares"), places=_PLACES)
    body = meaning(tree, _PLACES[0])
    if body not in _KNOWN:
        raise unknown(source, method, f"nobody read {METHOD} as it is: {body}")
    mappings = tree.module(MAPPINGS)
    if mappings is None:
        raise unknown(source, None, f"there is no {MAPPINGS}")
    for name, bodies in _SPLITS.items():
        check_known(mappings, name, bodies)
    return broken(
        TAKEN_FOR_A_SHARE, at(source, method, f"logits of all classes are taken for a share, as in {_KNOWN[body]}")
    )
