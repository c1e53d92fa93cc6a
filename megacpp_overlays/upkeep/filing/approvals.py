"""`packs/approvals.json`: who decided, in words that a person typed, that a pack may be sent.

An approval is of what would be sent and where, by hash; when any of that changes it counts no longer. Nothing here
sends anything: there is no way to post in this package. Nothing is signed either: whoever can write the file can write
an approval that nobody gave, and its history in git says who did.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megacpp_overlays import files, json_text
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.files import write_text
from megacpp_overlays.repro import manifest
from megacpp_overlays.upkeep.filing import filing
from megacpp_overlays.upkeep.filing.checks import Check, CheckOutcome
from megacpp_overlays.upkeep.filing.standing import READY, PackStatus

NAME = "approvals.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """One decision."""

    number: int
    date: str
    """Day, UTC, as 2026-11-21."""
    name: str
    """As the person typed it."""
    words: str
    """What the person typed to approve."""
    filing: str
    """Where it would be sent, as it was shown."""
    digest: str
    """SHA-256 of what would be sent and where."""


def words_for(number: int) -> str:
    """Return what a person types to approve a pack."""
    return f"post pack {number}"


def read(folder: Path) -> tuple[Approval, ...]:
    """Return the approvals of a folder of packs, the oldest first.

    Raises:
        UpkeepError: the file cannot be read, or is not what `pack approve` writes.
    """
    path = folder / NAME
    if not path.exists():
        return ()
    try:
        data = json_text.parse(path.read_text(encoding="utf-8"))
        found = tuple(Approval(**each) for each in data["approvals"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UpkeepError(f"{NAME} is not what `megacpp-overlays pack approve` writes: {error!r}") from error
    if data["schema"] != SCHEMA:
        raise UpkeepError(f"{NAME} has schema {data['schema']!r}, and this version knows {SCHEMA}")
    for each in found:
        if each.words != words_for(each.number) or not str(each.name).strip():
            raise UpkeepError(f"{NAME}: an approval of pack {each.number} without its words or a name is none")
    return found


def check(folder: Path, standing: PackStatus) -> Check:
    """Return whether what would be sent now, and where, was approved.

    Raises:
        UpkeepError: the approvals cannot be read.
    """
    if standing.settled:
        return Check(name="approval", outcome=CheckOutcome.FAILED, reason=f"nothing to approve: {standing.settled}")
    mine = [each for each in read(folder) if each.number == standing.number]
    now = filing.digest(standing)
    how = f"megacpp-overlays pack approve {standing.number}"
    if same := [each for each in mine if each.digest == now]:
        return Check(name="approval", outcome=CheckOutcome.PASSED, reason=f"on {same[-1].date}, by {same[-1].name}")
    said = f"approved on {mine[-1].date}, but for other content" if mine else "nobody approved it"
    return Check(name="approval", outcome=CheckOutcome.FAILED, reason=f"{said}: {how}")


def approve(folder: Path, standing: PackStatus, say: Callable[[str], None], ask: Callable[[str], str]) -> Approval:
    """Show what would be sent and where, let a person type the words, and record that.

    Args:
        folder: the folder of packs.
        standing: the pack.
        say: prints a line.
        ask: prints a question and returns the line that the person typed.

    Raises:
        UpkeepError: there is nothing to approve, or something else was typed. Nothing is recorded then.
    """
    if standing.settled:
        raise UpkeepError(f"pack {standing.number:02} cannot be approved: {standing.settled}")
    if not standing.is_ready:
        reason = f"its state is {standing.entry['state']}" if standing.entry["state"] != READY else "it is not ready"
        raise UpkeepError(f"pack {standing.number:02} cannot be approved: {reason}; it needs {standing.lacks[0]}")
    where = filing.of(standing)
    if where.way is filing.Way.UNKNOWN:
        raise UpkeepError(f"pack {standing.number:02} cannot be approved: where it goes is {where}")
    digest = filing.digest(standing)
    say(f"pack {standing.number:02}: {standing.entry['title']}")
    say(f"  {where}")
    for name, content in sorted(filing.contents(standing.pack).items()):
        kind = {manifest.README: "text", "pack.toml": "facts"}.get(name, "file")
        say(f"  {kind}  {content[:16]}  {name}")
    say(f"  all   {digest[:16]}")
    words = words_for(standing.number)
    if ask(f"Nothing is posted by this command. Type '{words}' to record that it may be: ").strip() != words:
        raise UpkeepError(f"something else was typed than '{words}': nothing is recorded")
    name = " ".join(ask("Your name, as it shall be recorded: ").split())
    if not name:
        raise UpkeepError("no name was typed: nothing is recorded")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    given = Approval(number=standing.number, date=today, name=name, words=words, filing=str(where), digest=digest)
    _append(folder, given)
    return given


def _append(folder: Path, given: Approval) -> None:
    with files.locked(folder):
        every = [asdict(each) for each in (*read(folder), given)]
        text = json.dumps({"schema": SCHEMA, "approvals": every}, indent=2, ensure_ascii=False) + "\n"
        write_text(folder / NAME, text)
