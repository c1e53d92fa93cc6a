"""Rearming: the part of `arm` for targets that may be loaded. It decides undone, interrupted and re-executed targets again.

Usually there is nothing to decide, so the modules for it are imported inside functions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from megacpp_overlays.loader.decide import before_import
from megacpp_overlays.loader.first_records import first_record
from megacpp_overlays.loader.heap import HeapSnapshot
from megacpp_overlays.loader.import_hooks import is_half_imported
from megacpp_overlays.loader.part_state import PartChange
from megacpp_overlays.loader.session_state import SessionState
from megacpp_overlays.loader.target_locks import changes_target
from megacpp_overlays.model import Decision, Overlay
from megacpp_overlays.source.trees import SourceTree


def begin_again(state: SessionState, tree: SourceTree) -> None:
    """Clear the undone state of all parts, so that they are decided again."""
    for erratum, part in list(state.parts.items()):
        if part.is_undone:
            if isinstance(erratum, Overlay):
                part.change = PartChange.ARMED_AGAIN
            part.record = first_record(state, erratum, tree)
            part.is_undone = False


@contextlib.contextmanager
def one_heap_walk(state: SessionState) -> Iterator[None]:
    """Share one walk over the heap among all overlays that are decided in the block."""
    state.heap = HeapSnapshot(lambda: _replaceable(state))
    try:
        yield
    finally:
        state.heap = None


def _replaceable(state: SessionState) -> Iterator[object]:
    """Yield every function that an overlay may replace, as its target has it now, and the descriptor around it."""
    from megacpp_overlays.loader import reached

    for overlay in state.declared.overlays:
        yield from reached.replaceable(overlay)


@changes_target
def settle_again(state: SessionState, name: str) -> None:
    """Decide the overlays of a target again that were undone or interrupted, or whose seams upstream's own code has replaced.

    Raises:
        ActivationError: see `changes.apply_all`.
    """
    lock = state.locks.at(name)
    if not lock.try_acquire():
        return  # another thread is changing this target
    try:
        module = sys.modules.get(name)
        is_there = module is not None and not is_half_imported(module)
        about = [(each, state.part(each)) for each in state.about(name)]
        for _, part in about:
            if not is_there and not part.is_placed:
                part.change = None  # the part waits for the import again
        chosen = [each for each, part in about if part.is_settled_by_arming or _has_changed(state, each)]
        if module is not None and is_there and chosen:
            from megacpp_overlays.loader import changes

            changes.apply_all(state, name, chosen, module, late=True)
    finally:
        lock.release()


def _has_changed(state: SessionState, overlay: Overlay) -> bool:
    """Return whether upstream's own code is in the place of a seam, or a seam is installed where none should be."""
    part = state.part(overlay)
    if not part.is_placed or before_import(overlay, state.settings).decision is Decision.DISABLED:
        return False
    from megacpp_overlays.loader import reached

    if part.is_active:
        return reached.resolve_symbols(overlay, part.record.shape, explain=True).upstreams_own
    return bool(reached.resolve_symbols(overlay).seams)
