"""Review of a decision in the running process: its seams are resolved again, and names that bypass them are searched."""

from __future__ import annotations

import sys
from typing import Any

from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import aliases, probing, reached
from megacpp_overlays.loader.reached import ResolvedSymbols
from megacpp_overlays.loader.seams import Seam
from megacpp_overlays.loader.traces import Traces
from megacpp_overlays.model import Decision, Overlay, Record
from megacpp_overlays.runtime import dynamo
from megacpp_overlays.runtime.seam_marks import mark_of, plain_function
from megacpp_overlays.source.trees import CachedTree, InstalledTree

_FROM_DISK = (
    "torch._dynamo.config.caching_precompile brings back compiled graphs of processes that may have run without this "
    "overlay; unset TORCH_CACHING_PRECOMPILE"
)
_MOST_NAMES = 3


def review(record: Record, overlay: Overlay, traces: Traces | None, *, deep: bool) -> Record:
    """Return the current record of an overlay whose target is loaded.

    Args:
        record: the record of the decision.
        overlay: the overlay of the record.
        traces: the places where it was installed.
        deep: whether to walk over the heap for objects that hold an original, and to compare a repair again with the loaded
            code, which compiles the source that was read.
    """
    if record.decision is Decision.RETIRED:
        record = _unless_replaced_since(record, overlay, deep=deep)
    if record.decision is not Decision.ACTIVE:
        return _unless_it_is_in(record, reached.resolve_symbols(overlay))
    if dynamo.come_from_disk():
        return replace(record, decision=Decision.CONFLICT, reason=_FROM_DISK)
    resolved = reached.resolve_symbols(overlay, record.shape, explain=True)
    stale = _stale_names(overlay, resolved, traces, deep=deep) if traces else []
    held = _held(resolved, traces) if traces and deep else []
    foreign = probing.held_against_its_readings(record)
    unread = [foreign.reason] if foreign is not record else []
    others = (*resolved.others, *stale, *held, *(foreign.around if unread else ()))
    if lost := [*resolved.lost, *stale, *held, *unread]:
        return replace(record, decision=Decision.CONFLICT, reason="; ".join(lost), around=others)
    record = replace(record, calls=_calls(resolved))
    if resolved.around:
        return replace(record, reason="; ".join([record.reason, *resolved.around]), around=others)
    return record


def _calls(resolved: ResolvedSymbols) -> tuple[tuple[str, int], ...]:
    return tuple((str(seam), count) for seam in resolved.seams if (count := seam.calls) is not None)


def _unless_replaced_since(record: Record, overlay: Overlay, *, deep: bool) -> Record:
    """Return the record of a retired overlay, as CONFLICT if other code has replaced upstream's repair since the decision."""
    if not deep:
        return probing.held_against_its_readings(record)
    return probing.held_against_the_process(record, CachedTree(InstalledTree()), sys.modules[overlay.target.module])


def _unless_it_is_in(record: Record, resolved: ResolvedSymbols) -> Record:
    """Return the record, as CONFLICT if seams are installed although none should be."""
    names = tuple(map(str, resolved.seams))
    if not names:
        return replace(record, seams=()) if record.seams else record
    if record.decision is Decision.CONFLICT and record.seams:
        return replace(record, seams=names, around=resolved.others)
    reason = (
        f"{', '.join(names)} leads to a seam of this overlay, which is {record.decision.value} here: {record.reason}"
    )
    return replace(record, decision=Decision.CONFLICT, reason=reason, seams=names, around=resolved.others)


def _stale_names(overlay: Overlay, resolved: ResolvedSymbols, traces: Traces, *, deep: bool) -> list[str]:
    """Return sentences on names that bypass the seams: they are bound to an original, or to code of an earlier execution."""
    originals = {id(seam.original_function) for seam in resolved.seams}
    known = {id(seam.function) for seam in resolved.seams}
    # The class that has a symbol now is not of an earlier execution, whether or not a seam is still on it.
    for owner in reached.owners(overlay):
        known |= {id(base) for base in owner.__mro__}
    older = [each for each in traces.objects() if id(each) not in known | originals]
    said = [
        f"{place} leads to the original again"
        for place in traces.places()
        if id(plain_function(place.own)) in originals
    ]
    wanted = [*older, *(seam.original_function for seam in resolved.seams if deep)]
    for names in reached.names_of(wanted).values():
        listed = ", ".join(sorted(names)[:_MOST_NAMES])
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        verb = "leads" if len(names) == 1 else "lead"
        said.append(f"{listed}{more} {verb} past the seam, to code of {overlay.target.module} from before it")
    return sorted(said)


def _held(resolved: ResolvedSymbols, traces: Traces) -> list[str]:
    """Return a sentence on the objects that hold an original, of this execution or of an earlier one; empty if there are none."""
    seams = {id(seam.original_function): seam for seam in resolved.seams}
    for each in traces.objects():
        if (mark := mark_of(each)) is not None:
            seams.setdefault(
                id(plain_function(mark.original)), Seam(_EarlierExecution, "", mark.original, each, inherited=False)
            )
    placed: list[Any] = list(seams.values())
    del seams
    found = aliases.holders(placed)
    return [f"an original is still held by {', '.join(found)}"] if found else []


class _EarlierExecution:
    """Placeholder for the owner of a seam of an earlier execution."""
