"""Prepare the commit that retires an overlay: go through the checklist, try the change on a copy, then make it."""

from __future__ import annotations

import datetime
import difflib
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

import megacpp_overlays
from megacpp_overlays.errors import LockError, OverlayError, UpkeepError
from megacpp_overlays.loader import retired
from megacpp_overlays.loader.retired import Retired
from megacpp_overlays.model import Overlay
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.upkeep import environments, locks
from megacpp_overlays.upkeep.locks import Lock
from megacpp_overlays.upkeep.retire import kept_matrices, lanes, leftovers, removal, retirement
from megacpp_overlays.upkeep.retire import retirement_texts as texts
from megacpp_overlays.upkeep.retire.lanes import Lane
from megacpp_overlays.upkeep.retire.retirement import Checklist, Item
from megacpp_overlays.upkeep.retire.working_tree import Change, WorkingTree

ENVIRONMENTS = ".envs"


class WrongNameError(UpkeepError):
    """Raised when an overlay, a lane or a version is named that cannot be meant; the text has those that can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for."""

    overlay: str
    lock: Path
    """What is shown is shown for this lock."""
    python: Path | None = None
    """Interpreter of an environment that holds it."""
    environments: Path | None = None
    """Where environments of lanes are; `.envs` of the checkout if not given."""
    leave: tuple[str, ...] = ()
    """Lanes that may run unpatched."""
    since: str | None = None
    """First release with upstream's repair; if not given, what a kept matrix says, else the pinned one."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it."""

    overlay: str
    items: tuple[Item, ...]
    changes: tuple[Change, ...] = ()
    """What was changed, or would be; empty where something was refused."""
    mentions: tuple[str, ...] = ()
    """What still names the overlay or what went with it, as `path:line: text`."""
    unused: tuple[str, ...] = ()
    """Files that nobody imports any more."""
    matrices: tuple[str, ...] = ()
    """Folders with a kept matrix, which still has the overlay."""
    message: tuple[str, ...] = ()
    """Paragraphs of the commit message."""
    others: bool = False
    """Whether the working tree has other changes, too."""

    @property
    def prepared(self) -> bool:
        """Whether the commit can be made."""
        return bool(self.changes)


def prepare(request: Request, overlays: Sequence[Overlay], show: Callable[[Item], None]) -> Outcome:
    """Go through the checklist, and change the checkout if all of it holds.

    Args:
        request: what was asked for.
        overlays: every declared overlay, in parts.
        show: called with each item of the checklist when it is known.

    Raises:
        WrongNameError: the overlay, a lane or a version is none.
        UpkeepError: the overlay is retired already, or cannot be retired from here; or the change could not be made,
            and everything is as it was.
        LockError: a lock cannot be read.
    """
    parts = _parts(request.overlay, overlays)
    lock = locks.read(request.lock)
    checkout = WorkingTree(Path(str(megacpp_overlays.__file__)).resolve().parent.parent)
    every_lane = lanes.of_checkout(checkout.root)
    for name in request.leave:
        _known(f"--leave {name}: there is no such lane", name, {each.lane for each in every_lane})
    files = checkout.files()
    matrices = kept_matrices.folders(files)
    gone = _entry(parts, lock, request.since or _first_fixed(checkout.root, matrices, parts[0], lock))
    planned = removal.plan(checkout.root, files, parts, overlays)
    checklist = Checklist(show)
    checklist.add("overlay", f"{gone.id}: {parts[0].title}", holds=True)
    folder = request.environments or checkout.root / ENVIRONMENTS
    with tempfile.TemporaryDirectory(prefix="retire-") as name:
        # The copy comes first, and then the look at what is modified: what is saved from here on is noticed, whenever.
        copy, kept = checkout.copy(Path(name, "copy")), Path(name, "kept")
        dirty = checkout.modified(planned.touched)
        checklist.add("working tree", "; ".join(map(str.strip, dirty)) or "clean where it will change", holds=not dirty)
        has_receipt = _examine(checklist, request, parts[0], lock, folder, planned.pack, kept)
        unpatched = _look_at_lanes(checklist, request, parts, lock, every_lane, folder)
        if not checklist.holds:
            checklist.skip("change", "nothing was changed")
            return Outcome(overlay=gone.id, items=tuple(checklist.items))
        reason = texts.reason(gone, [f"`{lane.name}` ({lane.pinned})" for lane in unpatched])
        try:
            removal.edit(copy.folder, planned, gone, reason)
            removal.bring_in_step(copy.folder, kept if has_receipt else None)
        except OverlayError as error:
            checklist.add("change", f"{error}; nothing was changed", holds=False)
            return Outcome(overlay=gone.id, items=tuple(checklist.items))
        others = bool(checkout.modified())
        changes = copy.changes()
        if not request.dry_run:
            checkout.take_over(changes)
        made = "would be" if request.dry_run else "were"
        checklist.add("change", f"{len(changes)} files {made} changed; ledger in step, receipts hold", holds=True)
        return Outcome(
            overlay=gone.id,
            items=tuple(checklist.items),
            changes=changes,
            mentions=tuple(removal.mentions(copy.folder, planned, parts[0])),
            unused=tuple(leftovers.unused(planned.graph, planned.files)),
            matrices=tuple(matrices),
            message=texts.message(gone, lock.lane, reason),
            others=others,
        )


def _parts(overlay_id: str, overlays: Sequence[Overlay]) -> list[Overlay]:
    parts = [overlay for overlay in overlays if overlay.id == overlay_id]
    if not parts and (before := retired.find(overlay_id)) is not None:
        raise UpkeepError(str(before))
    if not parts:
        _known(f"there is no overlay {overlay_id}", overlay_id, {overlay.id for overlay in overlays})
    return parts


def _known(problem: str, word: str, known: Collection[str]) -> None:
    if word not in known:
        close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
        meant = f"; did you mean {close[0]}?" if close else ";"
        raise WrongNameError(f"{problem}{meant} known: {', '.join(sorted(known)) or 'none'}")


def _first_fixed(root: Path, matrices: Sequence[str], overlay: Overlay, lock: Lock) -> str | None:
    pinned = lock.version(overlay.target.distribution)
    return kept_matrices.first_fixed(root, matrices, overlay.id, pinned) if pinned else None


def _entry(parts: Sequence[Overlay], lock: Lock, since: str | None) -> Retired:
    """Return the entry that stays of an overlay.

    Raises:
        LockError: the lock does not pin its target.
        WrongNameError: the release is no version, or newer than what the lock pins.
    """
    overlay = parts[0]
    distribution = overlay.target.distribution
    pinned = lock.version(distribution)
    if pinned is None:
        raise LockError(f"{lock.path}: it does not pin {distribution}, so it shows nothing about {overlay.id}")
    if since is not None:
        try:
            is_newer = Version(since) > Version(pinned)
        except InvalidVersion as error:
            raise WrongNameError(f"--since {since} is no version") from error
        if is_newer:
            raise WrongNameError(f"--since {since} is newer than {pinned}, which {lock.path} pins")
    return Retired(
        id=overlay.id,
        pack=overlay.pack,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        distribution=distribution,
        version=since or pinned,
        why=overlay.retire_when,
        targets=tuple(dict.fromkeys(part.target for part in parts)),
        threads=overlay.threads,
    )


def _examine(
    checklist: Checklist, request: Request, overlay: Overlay, lock: Lock, folder: Path, pack: Pack, kept: Path
) -> bool:
    """Ask the probe, the condition and the reproducer; return whether a receipt of the last is in the folder `kept`."""
    try:
        environment = environments.of(lock, folder=folder, python=request.python)
    except LockError as error:
        checklist.add("environment", str(error), holds=False)
        checklist.skip("reproducer", "there is no environment to run it in")
        return False
    checklist.add("environment", f"{environment.python} holds {lock.path}", holds=True)
    probed = retirement.probe(checklist, environment, overlay.id, overlay.retire_when)
    if not checklist.holds:
        checklist.skip("reproducer", "not run")
        return False
    return retirement.reproduce(checklist, environment, pack, probed, kept)


def _look_at_lanes(
    checklist: Checklist, request: Request, parts: Sequence[Overlay], lock: Lock, every: Sequence[Lock], folder: Path
) -> list[Lane]:
    names = {canonicalize_name(part.target.distribution) for part in parts}
    looked = list(lanes.look(parts[0].id, names, every, lock, folder))
    return retirement.other_lanes(checklist, looked, request.leave)
