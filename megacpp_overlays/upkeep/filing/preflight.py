"""The pre-flight: what must hold on the day when a pack is sent, in the order in which it is looked at.

It is short, so that it is followed. A receipt, a date in the notes or a memory stands for none of it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays.model import Erratum
from megacpp_overlays.repro import manifest, pack_file
from megacpp_overlays.upkeep.filing import approvals, filing, formatters, rendering, rerun, wording
from megacpp_overlays.upkeep.filing.checks import Check, CheckOutcome, Spot, by_spots, read_text
from megacpp_overlays.upkeep.filing.standing import READY, PackStatus
from megacpp_overlays.upkeep.filing.wording import Words

MAXIMUM_AGE = 14
"""Days since an upstream thread was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a person may choose."""

    tree: Path | None = None
    """Packages to run against, and the checkout that a diff applies to."""
    timeout: float = 900.0
    """Seconds for one process of a case."""
    words: Words | None = None
    """A private list, or None where there is none."""
    maximum_age: int = MAXIMUM_AGE
    """Days."""
    show: Callable[[str], None] = lambda _: None
    """Prints a line of the reproducer while it runs."""


def checks(folder: Path, standing: PackStatus, overlays: Sequence[Erratum], options: Options) -> Iterator[Check]:
    """Yield every check of a pack, each when it is done.

    Args:
        folder: the folder of packs.
        standing: the pack.
        overlays: every declared overlay, in parts.
        options: see there.

    Raises:
        OverlayError: the approvals cannot be read.
    """
    pack, kind = standing.pack, standing.entry["class"]
    yield rerun.check(pack, kind, overlays, tree=options.tree, timeout=options.timeout, show=options.show)
    yield _renders(standing)
    yield _attached(standing)
    yield _private(standing, options.words)
    yield formatters.check(filing.diffs(pack), standing.entry["repository"], options.tree)
    yield approvals.check(folder, standing)
    yield _meant_to_be_sent(standing)
    yield looked_at(standing, datetime.datetime.now(datetime.timezone.utc).date(), options.maximum_age)


def _renders(standing: PackStatus) -> Check:
    home = {each.number for each in standing.threads if each.repository == standing.entry["repository"]}
    elsewhere = {each.number for each in standing.threads} - home
    attached = {path.name for path in filing.attachments(standing.pack)}
    flaws = _notes(standing).flaws(attached=attached, elsewhere=elsewhere)
    return by_spots("text", _spots(flaws), "README.md renders, with all its sections", "README.md does not survive")


def _attached(standing: PackStatus) -> Check:
    name = "attachment"
    if not standing.has_reproducer:
        return Check(name=name, outcome=CheckOutcome.FAILED, reason="there is no reproduce.py to attach")
    pasted = _notes(standing).pasted(read_text(standing.pack.reproducer))
    names = ", ".join(path.name for path in filing.attachments(standing.pack))
    return by_spots(name, _spots(pasted), f"to attach: {names}", "the reproducer is pasted into README.md")


def _private(standing: PackStatus, words: Words | None) -> Check:
    pack = standing.pack
    paths = [pack.folder / manifest.README, *filing.attachments(pack)]
    paths += [pack.folder.parent / receipt["log"] for receipt in standing.entry["receipts"]]
    files = [(path.relative_to(pack.folder).as_posix(), path) for path in paths if path.is_file()]
    list_ = f"a list of {len(words.patterns)}" if words else f"no list (--private-words, or {wording.LIST})"
    spots = wording.search(files, words or Words())
    return by_spots("private words", spots, f"none in {len(files)} files; built-in patterns, and {list_}", "found:")


def _meant_to_be_sent(standing: PackStatus) -> Check:
    name = "to be sent"
    if standing.settled:
        return Check(name=name, outcome=CheckOutcome.FAILED, reason=standing.settled)
    if not standing.is_ready:
        state = standing.entry["state"]
        reason = "its claims do not hold" if state == READY else f"its state is {state}, not {READY}"
        return Check(name=name, outcome=CheckOutcome.FAILED, reason=reason, details=standing.lacks)
    where = filing.of(standing)
    outcome = CheckOutcome.FAILED if where.way is filing.Way.UNKNOWN else CheckOutcome.PASSED
    return Check(name=name, outcome=outcome, reason=str(where))


def looked_at(standing: PackStatus, today: datetime.date, maximum_age: int) -> Check:
    """Return whether somebody looked at upstream lately: at each thread that can still change, or else by a search.

    Args:
        standing: the pack.
        today: UTC.
        maximum_age: days.
    """
    name, oldest = "upstream", today - datetime.timedelta(days=maximum_age)
    if not standing.threads:
        searched = _searched(standing)
        if searched is not None and searched >= oldest:
            return Check(name=name, outcome=CheckOutcome.PASSED, reason=f"no thread is linked; searched on {searched}")
        when = f"searched on {searched}, more than {maximum_age} days ago" if searched else "no search is written down"
        todo = f"search {standing.entry['repository']}, then set searched in {pack_file.NAME}"
        return Check(name=name, outcome=CheckOutcome.FAILED, reason=f"no thread is linked, and {when}: {todo}")
    moving = [each for each in standing.threads if each.answer is None or not each.answer.final]
    late = [each for each in moving if each.checked is None or each.checked < oldest.isoformat()]
    said = [f"{each.name}: {each.state}, looked at on {each.checked or 'no day'}" for each in late or moving]
    if late:
        reason = f"{len(late)} threads were not looked at within {maximum_age} days: megacpp-overlays sweep"
        return Check(name=name, outcome=CheckOutcome.FAILED, reason=reason, details=tuple(said))
    reason = f"{len(standing.threads)} threads, each looked at within {maximum_age} days or final"
    return Check(name=name, outcome=CheckOutcome.PASSED, reason=reason, details=tuple(said))


def _searched(standing: PackStatus) -> datetime.date | None:
    there = (standing.pack.folder / pack_file.NAME).is_file()
    return pack_file.read(standing.pack.folder).searched if there else None


def _notes(standing: PackStatus) -> rendering.Notes:
    return rendering.Notes(read_text(standing.pack.folder / manifest.README))


def _spots(flaws: Sequence[rendering.Flaw]) -> list[Spot]:
    return [Spot(manifest.README, flaw.line, flaw.text) for flaw in flaws]
