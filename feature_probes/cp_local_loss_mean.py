"""By which number of tokens `forward_step_calc_loss` divides the loss of a context parallel rank: its own, or that of all.

A loss function that returns a sum, a number of tokens and a report has its sum divided by that number. Since 0.13.0 the
launcher's counts the tokens of its own part of the sequence, and DDP then takes the mean over ranks.

    0.14.0 to 0.19.2, main, dev     divided by what the rank counts: BROKEN
    0.13.0 and 0.13.1               the same within `forward_step`: BROKEN, and no seam
    0.7.0 to 0.12.3                 launchers of these releases count the tokens of all ranks: ABSENT
    up to 0.6.0                     the loss function divides: ABSENT
    main, 2025-08-01 to 2025-08-16  not told how many ranks there are: UNRECOGNISED

No tree has a repair. One that sums over ranks, or that takes their group, looks repaired.

The seam gets between the loss function and the division, and counts on everything behind to be as it was read: that nothing
else sums, and that DDP still divides by the number of all ranks, those of context parallelism included.

Source: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 9), https://github.com/NVIDIA/Megatron-LM/pull/7513
"""

from __future__ import annotations

import ast

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes.definitions import plain_function, words
from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import ModuleSource, SourceTree

FUNCTION = "forward_step_calc_loss"
CALLER = "forward_step"
TARGET = Target(distribution="megatron-core", module="megatron.core.pipeline_parallel.schedules", symbol=FUNCTION)
DDP = "megatron.core.distributed.distributed_data_parallel"
OWN_COUNT = "own-count"
OWN_COUNT_WITHIN = "own-count-within-forward-step"

_PLACES = (f"{TARGET.module}:{FUNCTION}", f"{TARGET.module}:{CALLER}")
_KNOWN = {
    "66f343ecd3c01ae3 effdb86673ca80de": "0.14.0",
    "7f375fa4a82e83b4 0ffc381a1db7cf4f": "0.15.0 to 0.15.3",
    "0762bddb1dfc2390 a071e1d42ad9cebc": "main of 2025-12-07",
    "5c2cef65c2a67434 49522c725ae833f7": "0.16.0 and 0.16.1",
    "5c2cef65c2a67434 a3d7584720729525": "main of 2026-02-01",
    "5c2cef65c2a67434 bb6c3615072a544e": "main of 2026-03-06",
    "79e874a02dc3e96a bb9b59eab566b9c9": "0.17.0 and 0.17.1",
    "ad21a114f22820a9 dbcb16a3b74e5874": "0.18.0 to 0.18.2",
    "82513e4b40dd2534 3d62e4027a2b125b": "dev of 2026-05-27",
    "aacd3988ef51d521 b7ee6813f73b6947": "main of 2026-06-01",
    "e5d110b0041bd83e 9c3e2431d4d78d8d": "main of 2026-06-03",
    "5aec45df5c69f6d3 da884b8bf9f9a49a": "dev of 2026-06-06",
    "8bd69c5c86bbf9f1 97d9e6edd9d84c39": "main of 2026-06-12",
    "40be999ebbb4b681 863289d0c99f8d9a": "0.19.0 to 0.19.2",
    "40be999ebbb4b681 a6f146a248fd1c55": "main of 2026-08-17",
}
"""What stands at the places, in every release and on every commit of main and dev until 2026-08-22, by the first that has it."""
_WITHIN = {"c078663d9d166b16": "0.13.0 and 0.13.1"}
_OF_ALL_RANKS = {
    "d8bea30a4ec404ff": "0.7.0",
    "94d2f163280f252e": "0.8.0",
    "59867f4a2caebbeb": "0.9.0 to 0.11.0",
    "d4212c7ab5d187e3": "0.12.0 to 0.12.3",
}
_UNDIVIDED = {
    "5195332653f8e866": "0.1.0 and 0.2.0",
    "f674951d1e1c8368": "0.3.0 and 0.4.0",
    "f8b876eac027f6d0": "0.5.0",
    "706f6c6fd3893ed5": "0.6.0",
}
"""What `forward_step` was, before it had a function for the loss."""
_FACTOR = "gradient_scaling_factor"
_ONE_IN_ALL_RANKS = "14b087822d1215a3"
"""How DDP makes the mean over ranks, since 2025-04-15."""
_REPAIRED: Repairs = {}
"""No repair was merged yet."""


def probe(tree: SourceTree) -> Finding:
    """Return whether each context parallel rank's loss is divided by its own number of tokens."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no module {TARGET.module}")
    function = plain_function(source, FUNCTION)
    if function is None:
        return _without_a_function(tree, source)
    found = " ".join(meaning(tree, where) for where in _PLACES)
    if (read_in := _KNOWN.get(found)) is not None:
        _check_mean_over_ranks(tree)
        seen = f"the loss of a rank is divided by the number of tokens that the rank counts, as in {read_in}"
        return broken(OWN_COUNT, at(source, function, seen))
    if {"all_reduce", "cp_group"} & words(function):
        return judged(tree, _REPAIRED, at(source, function, f"{FUNCTION} sums over ranks"), places=_PLACES)
    raise unknown(source, function, f"nobody read {FUNCTION} and {CALLER} as they are: {found}")


def _without_a_function(tree: SourceTree, source: ModuleSource) -> Finding:
    """Return what is known of a `forward_step` that has no function for the loss.

    Raises:
        SourceError: nobody read it.
    """
    caller = source.function(CALLER)
    if caller is None:
        return absent(f"defines neither {FUNCTION} nor {CALLER}", source)
    body = meaning(tree, _PLACES[1])
    if (read_in := _WITHIN.get(body)) is not None:
        seen = f"the loss of a rank is divided by the number of tokens that the rank counts, as in {read_in}"
        return broken(OWN_COUNT_WITHIN, at(source, caller, seen))
    if (read_in := _OF_ALL_RANKS.get(body)) is not None:
        return absent(f"the launcher's loss function counts the tokens of all ranks, as in {read_in}", source)
    if (read_in := _UNDIVIDED.get(body)) is not None:
        return absent(f"loss functions give no number of tokens, as in {read_in}", source)
    raise unknown(source, caller, f"there is no {FUNCTION}, and nobody read {CALLER} as it is: {body}")


def _check_mean_over_ranks(tree: SourceTree) -> None:
    """Check that DDP divides what ranks sum by their number, those of context parallelism included.

    Raises:
        SourceError: it may do something else.
    """
    source = tree.module(DDP)
    if source is None:
        raise SourceError(f"there is no module {DDP}")
    every = list(ast.walk(source.syntax))
    chosen = [each for each in every if isinstance(each, ast.If) and fingerprint(each) == _ONE_IN_ALL_RANKS]
    inside = {id(node) for each in chosen for node in ast.walk(each)}
    set_here = [
        each for each in every if isinstance(each, ast.Name) and each.id == _FACTOR and isinstance(each.ctx, ast.Store)
    ]
    if len(chosen) != 1 or any(id(each) not in inside for each in set_here):
        raise unknown(source, None, "gradients are scaled in a way that nobody read")
