"""Over which classes `vocab_parallel_cross_entropy` smooths labels: those of its own rank, or those of all.

`_VocabParallelCrossEntropy.forward` takes the number of classes, and the mean of their log-probabilities, from the tensor that
it holds, which is the rank's share of the vocabulary.

    0.13.0 to 0.18.2                     in the group of the process: BROKEN
    0.19.0 to 0.19.2, main, dev          in the group that its caller may give (#5128): BROKEN
    up to 0.12.3                         not tried: UNRECOGNISED

No tree has a repair. One that asks all ranks for a fourth sum looks repaired.

The seam lets upstream's forward pass run without smoothing, reads what it saves, and counts on its backward pass to take the
number of classes from the context. So all of these must be as they were read, with the helpers that they call and with
what binds every name in them. How many ranks there are is asked of the function that upstream asks for its share of the
vocabulary; a wrong answer would make losses without smoothing wrong as well, so its body is not read.

Source: https://github.com/NVIDIA/Megatron-LM/issues/737
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import calls, plain_class, plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

FUNCTION = "_VocabParallelCrossEntropy"
FORWARD = f"{FUNCTION}.forward"
ENTRY = "vocab_parallel_cross_entropy"
TARGET = Target(distribution="megatron-core", module="megatron.core.tensor_parallel.cross_entropy", symbol=FORWARD)
OWN_SHARE = "own-share"
OWN_SHARE_OF_A_GROUP = "own-share-of-a-group"

_PLACES = (
    f"{TARGET.module}:{FUNCTION}",
    f"{TARGET.module}:{ENTRY}",
    f"{TARGET.module}:VocabParallelCrossEntropy",
    "megatron.core.tensor_parallel.utils:VocabUtility",
)
_KNOWN = {
    "be7ed962e801f246 64d2c55973d8ec8c 641597c938ca0b2f 106aaa2c3c4ec310": OWN_SHARE,
    "37ecf0228652d1ce e01e1a081755db0d 641597c938ca0b2f 106aaa2c3c4ec310": OWN_SHARE_OF_A_GROUP,
}
"""Shapes by what stands at the places: 0.13.0 to 0.18.2, and 0.19.0 to 0.19.2, main until 2026-08-22 and dev until 2026-08-21."""
_SUMS = 3
"""Collectives of a forward pass that sums no log-probabilities: the maximum, the true class, the denominator."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether labels are smoothed over a rank's own share of the vocabulary."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    forward = source.function(FORWARD) if plain_class(source, FUNCTION) is not None else None
    if forward is None:
        if FUNCTION in source.text or plain_function(source, ENTRY) is not None:
            raise unknown(source, None, f"there is no {FORWARD} that is defined here")
        return absent(f"defines no {FUNCTION}", source)
    if "label_smoothing" not in words(forward):
        raise unknown(source, forward, f"{FORWARD} knows no label_smoothing")
    found = [meaning(tree, where) for where in _PLACES]
    if (shape := _KNOWN.get(" ".join(found))) is not None:
        seen = "labels are smoothed over the classes of the rank alone"
        return broken(shape, at(source, forward, seen))
    if len(calls(forward, "all_reduce")) > _SUMS:
        seen = f"{FORWARD} sums over ranks more than {_SUMS} times"
        return judged(tree, _REPAIRED, at(source, forward, seen), places=_PLACES)
    strange = [
        f"{where} {body}" for where, body, read in zip(_PLACES, found, _nearest(found), strict=True) if body != read
    ]
    raise unknown(source, forward, f"nobody read {', '.join(strange)}")


def _nearest(found: list[str]) -> list[str]:
    """Return what was read that has most in common with what was found."""
    every = [bodies.split() for bodies in _KNOWN]
    return max(every, key=lambda bodies: sum(one == other for one, other in zip(bodies, found, strict=True)))
