"""The retirement of an overlay: the checklist, the history entry, and the files that are left for a person to remove."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

import megacpp_overlays
from megacpp_overlays import files, near_names
from megacpp_overlays.errors import LockError, UpkeepError
from megacpp_overlays.loader import retired
from megacpp_overlays.loader.retired import RetiredOverlay
from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import git, receipts
from megacpp_overlays.repro.progress import Progress
from megacpp_overlays.upkeep import environments, locks
from megacpp_overlays.upkeep.locks import Lock
from megacpp_overlays.upkeep.retire import lanes, leavings, retirement
from megacpp_overlays.upkeep.retire.lanes import Lane
from megacpp_overlays.upkeep.retire.leavings import Leavings
from megacpp_overlays.upkeep.retire.retirement import Checklist, ChecklistItem

ENVIRONMENTS = ".envs"


class WrongNameError(UpkeepError):
    """Raised when the user names an unknown overlay or lane, or an invalid version; the message suggests known names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a retirement."""

    overlay: str
    lock: Path
    """The lock for which the retirement is proved."""
    python: Path | None = None
    """Interpreter of an environment that holds the lock."""
    environments: Path | None = None
    """The folder of the lanes' environments; `.envs` of the checkout if not given."""
    leave: tuple[str, ...] = ()
    """Lanes that may run unpatched."""
    since: str | None = None
    """First release with upstream's repair; the pinned one if not given."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RetirementOutcome:
    """The outcome of a retirement."""

    entry: RetiredOverlay
    """The history entry."""
    lane: str
    """The lane of the lock."""
    items: tuple[ChecklistItem, ...]
    leavings: Leavings
    unpatched: tuple[Lane, ...]
    """Lanes that lose the overlay and may still need it."""
    written: tuple[str, ...] = ()
    """Written files, as paths in the checkout; empty after a dry run or a refusal."""

    @property
    def holds(self) -> bool:
        """Whether the overlay may be retired."""
        return all(item.state is retirement.ItemState.DONE for item in self.items)


def prepare(
    request: Request,
    overlays: Sequence[Erratum],
    show: Callable[[ChecklistItem], None],
    tell: Callable[[str], object] = lambda line: None,
) -> RetirementOutcome:
    """Go through the checklist; if every item holds, write the history entry and keep the receipt that proves it.

    Args:
        request: the arguments of the retirement.
        overlays: every declared overlay, in parts.
        show: called with each item of the checklist when its result is known.
        tell: receives progress lines of steps that take minutes.

    Raises:
        WrongNameError: the overlay or a lane is unknown, or the version is invalid.
        UpkeepError: the overlay is retired already, or cannot be retired from here.
        LockError: a lock cannot be read.
        ManifestError: the receipt cannot be kept; nothing was written.
    """
    parts = _parts(request.overlay, overlays)
    overlay, lock = parts[0], locks.read(request.lock)
    root = _checkout()
    every_lane = lanes.of_checkout(root)
    for name in request.leave:
        _demand_known(f"--leave {name}: there is no such lane", name, {each.lane for each in every_lane})
    entry = _entry(parts, lock, request.since)
    tracked = git.run(root, "ls-files", "-z").split("\0")[:-1]
    left = leavings.find(root, tracked, overlay, overlays)
    checklist = Checklist(show)
    checklist.add("overlay", f"{entry.id}: {overlay.title}", holds=True)
    folder = request.environments or root / ENVIRONMENTS
    with tempfile.TemporaryDirectory(prefix="retire-") as name:
        kept = Path(name, "kept")
        has_receipt = _examine(checklist, request, overlay, lock, folder, left, kept, tell)
        unpatched = _look_at_lanes(checklist, request, parts, lock, every_lane, folder, tell)
        written: list[str] = []
        if checklist.holds and not request.dry_run:
            logs = receipts.adopt(kept, root / "packs") if has_receipt else []
            files.write_text(retired.FILE, retired.to_json([*retired.read(), entry]))
            written = [leavings.RETIRED, *(f"packs/{log}" for log in logs)]
    return RetirementOutcome(
        entry=entry,
        lane=lock.lane,
        items=tuple(checklist.items),
        leavings=left,
        unpatched=tuple(unpatched),
        written=tuple(written),
    )


def _checkout() -> Path:
    """Return the git checkout that this package is in.

    Raises:
        UpkeepError: the package is in no checkout.
    """
    root = Path(str(megacpp_overlays.__file__)).resolve().parent.parent
    top = git.ask(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        raise UpkeepError(
            f"{root} is no git checkout, so there is nothing to retire from; run the command with the package of a "
            "checkout: cd CHECKOUT && python -m megacpp_overlays"
        )
    return root


def _parts(overlay_id: str, overlays: Sequence[Erratum]) -> list[Erratum]:
    if (before := retired.find(overlay_id)) is not None:
        raise UpkeepError(str(before))
    _demand_known(f"there is no overlay {overlay_id}", overlay_id, {overlay.id for overlay in overlays})
    return [overlay for overlay in overlays if overlay.id == overlay_id]


def _demand_known(problem: str, word: str, known: Collection[str]) -> None:
    if word not in known:
        raise WrongNameError(f"{problem}; {near_names.suggestion(word, sorted(known))}")


def _entry(parts: Sequence[Erratum], lock: Lock, since: str | None) -> RetiredOverlay:
    """Return the history entry of an overlay.

    Raises:
        LockError: the lock does not pin its target.
        WrongNameError: the release is no version, or newer than the pinned version.
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
    return RetiredOverlay(
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
    checklist: Checklist,
    request: Request,
    overlay: Erratum,
    lock: Lock,
    folder: Path,
    left: Leavings,
    kept: Path,
    tell: Callable[[str], object],
) -> bool:
    """Check the probe, the condition and the reproducer; return whether the reproducer's receipt is in the folder `kept`."""
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
    return retirement.reproduce(checklist, environment, left.pack, probed, kept, tell)


def _look_at_lanes(
    checklist: Checklist,
    request: Request,
    parts: Sequence[Erratum],
    lock: Lock,
    every: Sequence[Lock],
    folder: Path,
    tell: Callable[[str], object],
) -> list[Lane]:
    names = {canonicalize_name(part.target.distribution) for part in parts}
    chosen = lanes.concerned(names, every, lock)
    progress = Progress(len(chosen))
    looked = []
    for lane in lanes.look(parts[0].id, names, chosen, lock, folder):
        looked.append(lane)
        tell(progress.done(f"lane {lane.name}"))
    return retirement.other_lanes(checklist, looked, request.leave)
