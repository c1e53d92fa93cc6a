"""From a loaded target to seams that are in, reached and tested.

Either every seam of an overlay is in and verified when `install` returns, or it raises and upstream is exactly
as it was.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from megacpp_overlays.errors import OverlayError, SeamError
from megacpp_overlays.loader import aliases, ownership, seams
from megacpp_overlays.loader.seams import Seam
from megacpp_overlays.model import Overlay, Replacement
from megacpp_overlays.runtime import dynamo, seam_marks
from megacpp_overlays.source.trees import SourceTree


class RefusedError(OverlayError):
    """Raised when a check says no. The text becomes the reason of the conflict."""


@dataclass(frozen=True, slots=True)
class PlacedSeams:
    """What one overlay changed."""

    seams: tuple[Seam, ...]
    rebound: tuple[Seam, ...]

    @property
    def changes(self) -> tuple[Seam, ...]:
        """Everything that was changed, in order."""
        return (*self.seams, *self.rebound)

    def still_in_place(self) -> PlacedSeams:
        """Return what is left of it: executing a module again overwrites the seams in its namespace."""
        return PlacedSeams(
            tuple(seam for seam in self.seams if seam.in_place), tuple(seam for seam in self.rebound if seam.in_place)
        )


class Circumstances(NamedTuple):
    """When seams go in, and who hears of what that costs."""

    late: bool
    """Whether other code could run between the import of the target and now. Then objects, too, are searched for the
    original; so they are whenever its count of references says that somebody holds it. Graphs that were compiled before
    may contain the original, too, and are dropped."""
    again: bool = False
    """Whether the overlay was undone on purpose; instances that were built meanwhile are then as wanted."""
    dropped: Callable[[str], object] | None = None
    """Is told which compiled graphs were dropped."""


def install(
    overlay: Overlay, shape: str, module: ModuleType, tree: SourceTree, circumstances: Circumstances
) -> PlacedSeams:
    """Put in all seams of an overlay, rebind every live alias to them, and test the result.

    Args:
        overlay: the declaration.
        shape: the broken shape that the probe found.
        module: the target module, completely executed.
        tree: where its source is read.
        circumstances: how late it is.

    Raises:
        RefusedError: the live object is somebody else's, a witness disagrees with the probe, the original is still
            held, instances were built without the seam, or the self-test fails.
        SeamError: an attribute cannot be replaced, or a compiled graph cannot be dropped.
    """
    late, again, dropped = circumstances
    graphs = None if late else dynamo.graphs()
    replacements = overlay.replacements[shape]
    source = tree.module(overlay.target.module)
    if source is None:
        raise RefusedError(f"{overlay.target.module} is loaded but has no source")
    if sys.modules.get(overlay.target.module) is not module:
        raise RefusedError(f"{overlay.target.module} put something else in its place in sys.modules")
    for replacement in replacements:
        if (owner := ownership.foreign_owner(module, replacement.symbol, source)) is not None:
            raise RefusedError(owner)
    places = [seams.resolve(module, replacement.symbol) for replacement in replacements]
    ours = [seam_marks.mark_of(seams.raw_attribute(*place)[0]) is not None for place in places]
    if not any(ours) and overlay.witness is not None and not (seen := overlay.witness(module)).broken:
        raise RefusedError(f"the probe says BROKEN but the loaded code does not behave so: {seen.seen}")
    deep = late or any(aliases.is_held_elsewhere(*place) for place in places)
    placed: list[Seam] = []
    rebound: list[Seam] = []
    with contextlib.nullcontext() if all(ours) else dynamo.changing(graphs, dropped=dropped):
        try:
            for replacement in replacements:
                placed.append(_place(overlay, replacement, module))  # noqa: PERF401 - what is in must be known if one fails
            # What is adopted was reached and verified by whoever put it in, and is theirs to undo.
            fresh = [seam for seam in placed if not seam.adopted]
            aliases.rebind(fresh, rebound, deep=deep)
            if deep:
                _refuse_holders(fresh)
            if late and not again:
                _refuse_instances(fresh)
            _self_test(overlay, module)
        except BaseException:
            undo_all((*(seam for seam in placed if not seam.adopted), *rebound))
            raise
    return PlacedSeams(tuple(placed), tuple(rebound))


def _self_test(overlay: Overlay, module: ModuleType) -> None:
    seen = overlay.self_test(module)
    if seen.broken:
        raise RefusedError(f"the self-test failed after installing: {seen.seen}")


def _place(overlay: Overlay, replacement: Replacement, module: ModuleType) -> Seam:
    owner, name = seams.resolve(module, replacement.symbol)
    return seams.replace(owner, name, lambda original: replacement.make(original, module), overlay_id=overlay.id)


def _refuse_holders(placed: Sequence[Seam]) -> None:
    if held := aliases.holders(placed):
        raise RefusedError(
            f"the original of {', '.join(map(str, placed))} is still held by {', '.join(held)}; "
            "if that is not upstream's own doing, import megacpp_overlays first"
        )


def _refuse_instances(placed: Sequence[Seam]) -> None:
    if built := aliases.built_before(placed):
        raise RefusedError(
            f"{', '.join(map(str, placed))} came too late for instances that were built before: {', '.join(built)}; "
            "import megacpp_overlays first"
        )


def undo_all(changed: Sequence[Seam]) -> None:
    """Undo seams, the last first; try them all before an error leaves.

    Raises:
        SeamError: at least one attribute was replaced by somebody else meanwhile.
    """
    lost = [seam for seam in reversed(changed) if not seam.undo()]
    if lost:
        raise SeamError("; ".join(seam.taken_by() for seam in lost))
