"""Whose tokens `process_mtp_loss` weighs a further prediction with where losses are summed over tokens: a rank's, or those of all.

With `calculate_per_token_loss` gradients are divided, once they are summed over ranks, by the tokens of the main loss. A further
prediction has fewer, so its loss is multiplied by the one count over the other. Both are those of the rank.

    up to 0.16.1            no count goes into that loss: ABSENT
    0.17.0 to 0.19.2, main  the rank's own (#3159): BROKEN
    dev                     the same, with rolls that take lists: BROKEN, and no seam

No tree has a repair. One that asks all ranks within `process_mtp_loss` looks repaired.

The seam tells upstream's function to divide by the rank's count alone, gives it a scaling factor that holds everything else, and
takes the count from what the function rolls. So it must be one whose steps were read, with all functions that it calls.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 3
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.definitions import plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.trees import SourceTree

LOSS = "process_mtp_loss"
ROLL = "roll_tensor"
SCALER = "MTPLossAutoScaler"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.multi_token_prediction", symbol=LOSS)
MODEL = "megatron.core.models.gpt.gpt_model"
LOCAL = "local-counts"
LOCAL_OF_LISTS = "local-counts-of-lists"

_PLACES = (f"{TARGET.module}:{LOSS}", f"{TARGET.module}:{SCALER}")
_SCALED = "b881ae84f9629c32"
_KNOWN = {
    f"91b1b9e4a621bdf2 {_SCALED}": (LOCAL, "0.17.0 and 0.17.1"),
    f"172b7b5de23b1d40 {_SCALED}": (LOCAL, "0.18.0 to 0.18.2"),
    f"9bd79b0d31a6a29b {_SCALED}": (LOCAL, "0.19.0 to 0.19.2, main until 2026-08-21"),
    f"59e20a5d2a49d711 {_SCALED}": (LOCAL, "main of 2026-08-22"),
    f"17dd22ee63150cd6 {_SCALED}": (LOCAL_OF_LISTS, "dev of 2026-08-10 to 2026-08-21"),
}
"""Shapes by what stands at the places, and where each was read first and last."""
_COUNT = "original_num_tokens"
"""What upstream calls the tokens of the main loss, wherever they go into the loss of a further prediction."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether the loss of a further prediction is weighed with the tokens of the rank alone."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    loss = plain_function(source, LOSS)
    if loss is None:
        for each in (source, tree.module(MODEL)):  # up to 0.16.1 the loss is within a model's forward
            if each is not None and _COUNT in each.text:
                raise unknown(each, None, f"there is no {LOSS}, and {_COUNT} is mentioned")
        return absent(f"defines no {LOSS}", source)
    if "all_reduce" in words(loss):
        return judged(tree, _REPAIRED, at(source, loss, f"{LOSS} asks other ranks"), places=_PLACES)
    found = [meaning(tree, where) for where in _PLACES]
    if (known := _KNOWN.get(" ".join(found))) is None:
        raise unknown(source, loss, f"nobody read {LOSS} {found[0]} with {SCALER} {found[1]}")
    shape, read_in = known
    seen = f"{_COUNT} and num_tokens are those of the rank alone, as in {read_in}"
    return broken(shape, at(source, loss, seen))
