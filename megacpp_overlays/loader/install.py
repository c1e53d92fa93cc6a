"""Installation of the seams of an overlay in a loaded target, with checks of aliases and a self-test.

Installation is atomic: when `install` returns, every seam of an overlay is in place and verified. Otherwise it raises, and
upstream is unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from megacpp_overlays.errors import OverlayError, SeamError
from megacpp_overlays.loader import aliases, known, live_names, ownership, reached, seams
from megacpp_overlays.loader.aliases import MarkedName
from megacpp_overlays.loader.heap import HeapSnapshot, others_were_loaded
from megacpp_overlays.loader.import_hooks import unfinished_imports
from megacpp_overlays.loader.live_names import LiveName
from megacpp_overlays.loader.seams import Note, Seam
from megacpp_overlays.loader.traces import Traces
from megacpp_overlays.model import Overlay, Replacement
from megacpp_overlays.runtime import calls, dynamo, seam_marks
from megacpp_overlays.source.trees import SourceTree


class RefusedError(OverlayError):
    """Raised when a check of an installation fails. The text becomes the reason of the conflict."""


@dataclass(frozen=True, slots=True)
class PlacedSeams:
    """The seams and rebound aliases of one overlay."""

    seams: tuple[Seam, ...]
    rebound: tuple[Seam, ...]

    @property
    def changes(self) -> tuple[Seam, ...]:
        """All changed attributes, in order."""
        return (*self.seams, *self.rebound)


class Circumstances(NamedTuple):
    """Circumstances of an installation: its time relative to other code, and callbacks for its effects."""

    late: bool
    """Whether other code could run between the import of the target and now. Then objects, too, are searched for the
    original, as they are whenever its reference count shows that another object holds it. Graphs that were compiled before
    may contain the original, too, and are dropped."""
    again: bool = False
    """Whether the overlay was undone on purpose; instances that were built meanwhile are then accepted."""
    dropped: Callable[[str], object] | None = None
    """Called with a description of the compiled graphs that were dropped."""
    note: Note = seams.unnoted
    """Called with each seam and alias before it is installed."""
    heap: HeapSnapshot | None = None
    """A snapshot shared by overlays that are armed together."""
    signature: bool = False
    """Whether a seam must accept every parameter of the replaced function by name: required for source that the probe does not recognise."""


def install(
    overlay: Overlay, shape: str, module: ModuleType, tree: SourceTree, circumstances: Circumstances
) -> PlacedSeams:
    """Install all seams of an overlay, rebind every live alias to them, and test the result.

    Args:
        overlay: the declaration.
        shape: the broken shape that the probe found.
        module: the target module, completely executed.
        tree: the source tree of the module.
        circumstances: of this installation.

    Raises:
        RefusedError: the live object is third-party code, a witness disagrees with the probe, the original is still
            held, instances were built without the seam, or the self-test fails.
        SeamError: an attribute cannot be replaced, or a compiled graph cannot be dropped.
    """
    late, again, dropped, note, shared, signature = circumstances
    graphs = None if late else dynamo.graphs()
    replacements = overlay.replacements[shape]
    source = tree.module(overlay.target.module)
    if source is None:
        raise RefusedError(f"{overlay.target.module} is loaded but has no source")
    if sys.modules.get(overlay.target.module) is not module:
        raise RefusedError(f"{overlay.target.module} put something else in its place in sys.modules")
    written = known.places(overlay, tree)
    places: list[LiveName] = []
    for replacement in replacements:
        symbol = replacement.symbol
        places.append(live_names.resolve(module, symbol))
        if (owner := ownership.foreign_owner(places[-1], symbol, source, written.get(symbol))) is not None:
            raise RefusedError(owner)
    ours = [place.mark is not None for place in places]
    if not any(ours):
        _ask_witness(overlay, module)
    deep = late or any(map(aliases.is_held_elsewhere, places))
    # Reference counts cover functions in their own place. No other code can take a reference before this import is over.
    is_known_elsewhere = deep or any(ours) or any(place.inherited for place in places)
    loaded = set(sys.modules)
    placed: list[Seam] = []
    rebound: list[Seam] = []
    heap = shared or aliases.snapshot(placed)

    def keep(seam: Seam) -> None:
        note(seam)
        placed.append(seam)

    with contextlib.nullcontext() if all(ours) else dynamo.changing(graphs, dropped=dropped):
        try:
            for place, replacement in zip(places, replacements, strict=True):
                _place(overlay, place, replacement, module, keep, signature=signature)
            # An adopted seam was verified by the session that installed it, which also undoes it.
            fresh = [seam for seam in placed if not seam.adopted]
            if is_known_elsewhere or others_were_loaded(loaded):  # the seams may have imported what takes an original
                aliases.rebind(placed, rebound, deep=deep, note=note, heap=heap)
            if deep:
                _refuse_holders(fresh, heap)
            if late and not again:
                _refuse_instances(fresh)
            _self_test(overlay, module)
        except BaseException:
            undo_all((*(seam for seam in placed if not seam.adopted), *rebound))
            raise
    return PlacedSeams(tuple(placed), tuple(rebound))


def _ask_witness(overlay: Overlay, module: ModuleType) -> None:
    """Raise if the witness does not see the defect of the finding; skipped while the loaded code cannot run yet."""
    if overlay.witness is None or unfinished_imports(module):
        return
    with calls.not_counted():
        seen = overlay.witness(module)
    if not seen.broken:
        raise RefusedError(f"the probe says BROKEN but the loaded code does not behave so: {seen.seen}")


def _self_test(overlay: Overlay, module: ModuleType) -> None:
    with calls.not_counted():
        seen = overlay.self_test(module)
    if seen.broken:
        raise RefusedError(f"the self-test failed after installing: {seen.seen}")


def _place(
    overlay: Overlay, place: LiveName, replacement: Replacement, module: ModuleType, note: Note, *, signature: bool
) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        made = replacement.make(original, module)
        if signature and (lost := _not_taken(original, made)):
            where = f"{module.__name__}.{replacement.symbol}"
            raise RefusedError(f"signature: upstream's {where} takes {', '.join(lost)}, and the seam does not")
        return made

    seams.replace(*place, make, overlay_id=overlay.id, module=overlay.target.module, note=note)


def _refuse_holders(placed: Sequence[Seam], heap: HeapSnapshot | None) -> None:
    if held := aliases.holders(placed, heap):
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


def _not_taken(original: object, seam: object) -> list[str]:
    """Return the parameters of a function that a seam does not accept by name."""
    if not (callable(original) and callable(seam)):
        return []
    try:
        theirs, ours = (inspect.signature(each, follow_wrapped=False).parameters for each in (original, seam))
    except (TypeError, ValueError):  # a function without a signature
        return []
    if any(each.kind is each.VAR_KEYWORD for each in ours.values()):
        return []
    named = (each.name for each in theirs.values() if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY})
    return [name for name in named if name not in ours and name != "self"]


def undo_all(changed: Sequence[Seam]) -> None:
    """Undo seams in reverse order; try all of them before raising.

    Raises:
        SeamError: at least one attribute was replaced by other code meanwhile, or cannot be assigned.
    """
    if problems := [problem for seam in reversed(changed) if (problem := _problem_of(seam))]:
        raise SeamError("; ".join(problems))


def _problem_of(seam: Seam) -> str:
    """Undo a seam; return the reason if it cannot be undone, else an empty text."""
    try:
        return "" if seam.undo() else seam.taken_by()
    except Exception as error:  # noqa: BLE001 - an owner may raise any exception
        return f"{seam} cannot be put back: {type(error).__name__}: {error}"


class TakenOut(NamedTuple):
    """The result of taking out an overlay."""

    problems: tuple[str, ...]
    """A sentence for each name that could not be restored."""
    kept: tuple[str, ...]
    """Names that were not restored."""


def take_out(overlay: Overlay, traces: Traces, names: Sequence[MarkedName] | None = None) -> TakenOut:
    """Restore the original in every place of an overlay, of any earlier installation; safe to repeat.

    Seams are found by their marks, so that an interrupted call leaves none behind. Each place is forgotten once it is
    restored. A place that cannot be restored does not stop the others.

    Args:
        overlay: the overlay to take out.
        traces: the places where it was installed.
        names: the module names that are bound to seams, where several overlays are taken out together.
    """
    problems: list[str] = []
    kept: list[str] = []
    for seam in reached.resolve_symbols(overlay).seams:
        traces.note(seam)
    for place in traces.places():
        raw = place.own
        mark = seam_marks.mark_behind(raw)
        if mark is not None and reached.is_ours(mark, overlay):
            problem = _problem_of(aliases.as_found(*place, raw, mark))
        else:
            problem = _taken_over(place, raw, traces)
        if problem:
            problems.append(problem)
            kept.append(str(place))
        else:
            traces.forget(place)
    problems += aliases.restore(functools.partial(reached.is_ours, overlay=overlay), names)
    return TakenOut(tuple(problems), tuple(kept))


def _taken_over(place: LiveName, raw: object, traces: Traces) -> str:
    """Return a message if third-party code is in a former place of a seam; empty if upstream's code or nothing is there."""
    function = seam_marks.plain_function(raw)
    if raw is None or any(function is each for each in traces.objects()):
        return ""
    known = {each.__code__.co_filename for each in traces.objects() if isinstance(each, FunctionType)}
    if type(function) is FunctionType and function.__code__.co_filename in known:
        return ""  # upstream's own code, from another execution of the module
    return f"{place} was replaced after us by {seams.describe(raw)}; not undone"
