"""Edits of upstream as records, and their application to source text. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import tomllib

FILE = Path(__file__).with_name("edits.toml")


class Kind(str, Enum):
    """The effect of an edit on the defect of its overlay."""

    SAME = "same"
    """None: names, places and signatures are others."""
    REPAIR = "repair"
    """It is gone, in another form or place than in upstream's repair."""
    BACK = "back"
    """It is there again in code that was right."""


NEVER: Mapping[Kind, frozenset[str]] = {
    Kind.SAME: frozenset({"retired", "absent"}),
    Kind.REPAIR: frozenset({"active"}),
    Kind.BACK: frozenset({"retired", "absent"}),
}
"""Decisions that are wrong after an edit of a kind."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Where the files that are edited come from: a release, or a commit of a checkout."""

    name: str
    distribution: str
    version: str | None
    """Of a release, whose wheel is unpacked."""
    commit: str | None
    """Of Megatron-LM."""


@dataclass(frozen=True, slots=True)
class Change:
    """One replacement in a file, of text that is in it once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit that is about one overlay."""

    id: str
    kind: Kind
    overlay: str
    tree: Tree
    round: int
    """Edits of one tree and round are in one folder."""
    why: str
    changes: tuple[Change, ...]

    def is_wrong(self, decision: str) -> bool:
        """Return whether a decision after this edit is wrong."""
        return decision in NEVER[self.kind]


class EditError(Exception):
    """Raised where an edit does not fit its tree; the text names both."""


def load(path: Path = FILE) -> tuple[Edit, ...]:
    """Return all edits of a file."""
    given = tomllib.loads(path.read_text(encoding="utf-8"))
    trees = {
        name: Tree(name, each["distribution"], each.get("version"), each.get("commit"))
        for name, each in given["trees"].items()
    }
    return tuple(_edit(row, trees) for row in given["edit"])


def _edit(row: Mapping[str, Any], trees: Mapping[str, Tree]) -> Edit:
    changes = tuple(Change(each["file"], each["old"], each["new"]) for each in row["change"])
    return Edit(row["id"], Kind(row["kind"]), row["overlay"], trees[row["tree"]], row["round"], row["why"], changes)


def applied(edits: Sequence[Edit], texts: Mapping[str, str]) -> dict[str, str]:
    """Return files with all edits made.

    Args:
        edits: of one tree and round.
        texts: of each file that they change, by its path in the tree.

    Raises:
        EditError: text that is replaced is not there exactly once, or the result is no Python.
    """
    found = dict(texts)
    for edit in edits:
        for change in edit.changes:
            if (times := found[change.file].count(change.old)) != 1:
                raise EditError(f"{edit.id}: its old text is {times} times in {change.file} of {edit.tree.name}")
            found[change.file] = found[change.file].replace(change.old, change.new)
    for file, text in found.items():
        _check(file, text, edits)
    return found


def _check(file: str, text: str, edits: Sequence[Edit]) -> None:
    try:
        compile(text, file, "exec")
    except SyntaxError as error:
        ids = ", ".join(edit.id for edit in edits if any(change.file == file for change in edit.changes))
        raise EditError(f"{file} of {edits[0].tree.name} is no Python after {ids}: {error}") from error
