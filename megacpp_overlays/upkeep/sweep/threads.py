"""`packs/threads.json`: the saved answers about each upstream issue and pull request that the lane waits on.

A sweep without a network uses these answers. Each answer names its source: `api` is the host's own answer, and
`stored copy` is an older copy of the thread or of the repository's history, with the date of that copy. No title and no
text of a thread is kept.

Each answer also has the state that the lane's own texts declare, as one word of a closed list that a person chose. A sweep
compares this word with the host's answer and never changes it. The free text of declarations is for people only; no
program reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

from megacpp_overlays import json_text
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.files import write_text
from megacpp_overlays.repro import inventory, schema

NAME, SCHEMA_NAME = "threads.json", "threads.schema.json"
SCHEMA = 1

OPEN, DRAFT, CLOSED, MERGED, RELEASED = "open", "draft", "closed", "merged", "released"
ISSUE, PULL = "issue", "pull request"
API = "api"

Key: TypeAlias = "tuple[str, int]"
"""Repository and number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The state of one thread on one day. Unknown fields are None. Days are UTC."""

    repository: str
    number: int
    kind: str | None
    """`issue` or `pull request`."""
    state: str | None
    """`open`, `draft`, `closed` or `merged`."""
    reason: str | None
    """The host's reason for closing an issue: `completed`, `not_planned`, `duplicate`."""
    created: date | None
    closed: date | None
    merged: date | None
    merge_commit: str | None
    base: str | None
    """The branch that the pull request was or is to be merged to."""
    released_in: str | None
    """Tag of the first release that contains the merge commit. A cherry-pick has another commit and is not found."""
    released: date | None
    """Day of that release."""
    prerelease: str | None
    """Tag of a pre-release that contains the merge commit, where no release does."""
    releases_checked: date | None
    """Day on which the releases were searched for the merge commit."""
    moved_to: str | None
    """The present `owner/name#number` of the thread on the host, if it moved."""
    checked: date
    """Day of the host's answer, or of the stored copy."""
    source: str
    """`api` or `stored copy`."""
    declared: str | None
    """The state in the declarations, as a person read them: `open`, `draft`, `closed`, `merged`, or `released` for a merge that
    is in a release. None where the declarations claim no state."""

    @property
    def key(self) -> Key:
        """The identity of the thread."""
        return self.repository, self.number

    @property
    def final(self) -> bool:
        """Whether the state can no longer change: by the host's own answer it is merged, and it is in a release."""
        return self.source == API and self.state == MERGED and self.released_in is not None

    def contradiction(self) -> str | None:
        """Return how the state contradicts its declaration, in words; None without a contradiction."""
        standing = RELEASED if self.released_in else self.state
        if self.declared in {None, standing} or standing is None or (self.declared, standing) == (OPEN, DRAFT):
            return None
        if (self.declared, standing) == (MERGED, RELEASED):
            return f"is in {self.released_in}"
        if (self.declared, standing) == (RELEASED, MERGED):
            was_searched = self.releases_checked is not None and self.prerelease is None
            return f"is in no release on {self.releases_checked}" if was_searched else None
        return f"is {self.sentence()}"

    def sentence(self) -> str:
        """Return the state in one line: `merged 2026-07-30 to main, in v0.8.2 (2026-08-18)`."""
        if self.state is None:
            return "unknown"
        day = {MERGED: self.merged, CLOSED: self.closed}.get(self.state)
        text = f"{self.state} {day}" if day else self.state
        if self.reason:
            text += f", {self.reason.replace('_', ' ')}"
        if self.state == MERGED:
            text += f" to {self.base}" if self.base else ""
            text += self._release()
        return f"{text}, moved to {self.moved_to}" if self.moved_to else text

    def _release(self) -> str:
        if self.released_in:
            return f", in {self.released_in}" + (f" ({self.released})" if self.released else "")
        if self.prerelease:
            return f", only in the pre-release {self.prerelease}"
        return f", in no release on {self.releases_checked}" if self.releases_checked else ""


def read(folder: Path) -> Mapping[Key, Answer]:
    """Return the saved answers of a folder of packs; empty where the file does not exist.

    Raises:
        UpkeepError: the file cannot be read, is no JSON, does not fit its schema, or has two answers for a thread.
    """
    path = folder / NAME
    try:
        data = json_text.parse(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UpkeepError(f"{path}: cannot read the saved answers: {error}; `git checkout` brings them back") from error
    rules = json.loads((inventory.own_folder() / SCHEMA_NAME).read_text())
    if wrong := schema.problems(data, rules):
        places = "; ".join(each.removeprefix("manifest").lstrip(".:") for each in wrong)
        raise UpkeepError(f"{path}: does not fit {SCHEMA_NAME}: {places}")
    found: dict[Key, Answer] = {}
    for entry in data["threads"]:
        try:
            answer = _from_json(entry)
        except ValueError as error:
            raise UpkeepError(f"{path}: {entry['repository']}#{entry['number']}: {error}") from error
        if answer.key in found:
            raise UpkeepError(f"{path}: {answer.repository}#{answer.number} is there twice")
        found[answer.key] = answer
    return found


def write(folder: Path, answers: Iterable[Answer]) -> None:
    """Write the saved answers atomically, sorted by repository and number.

    Raises:
        UpkeepError: the file cannot be written.
    """
    ordered = sorted(answers, key=lambda answer: answer.key)
    text = json.dumps({"schema": SCHEMA, "threads": [to_json(answer) for answer in ordered]}, indent=2) + "\n"
    try:
        write_text(folder / NAME, text)
    except OSError as error:
        raise UpkeepError(f"{folder / NAME}: cannot write the answers: {error.strerror}") from error


_DAYS = frozenset({"created", "closed", "merged", "released", "releases_checked", "checked"})


def to_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain data, in the form of the file."""
    return {name: value.isoformat() if isinstance(value, date) else value for name, value in asdict(answer).items()}


def _from_json(entry: Mapping[str, Any]) -> Answer:
    values: dict[str, Any] = {field.name: entry.get(field.name) for field in fields(Answer)}
    for name in _DAYS:
        values[name] = date.fromisoformat(values[name]) if values[name] else None
    return Answer(**values)
