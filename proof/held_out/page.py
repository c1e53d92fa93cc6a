"""The page about held-out edits, made of their receipts. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from held_out.edits import Edit, Kind

TITLES = {
    Kind.SAME: "Nothing changes: the overlay has to be active",
    Kind.REPAIR: "Repaired in another form: the overlay must not be active",
    Kind.BACK: "Brought back: the overlay must not be retired",
}
INTRODUCTION = """\
# Held-out edits of upstream

Written by `make held-out`. Each edit was written from upstream's text and committed before a probe, a contract or a reproducer was asked
about it ([edits](../held_out/edits.toml)). Edits that do not touch each other are made in one tree. An audit decides on it as it is, and once
more after `megacpp-overlays witness` has run for the overlays that are edited, without a GPU. Before an edit the overlay is active, or
retired where the defect is to be brought back.
"""


def markdown(edits: Sequence[Edit], found: Mapping[str, Mapping[str, Any]], notes: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        edits: all of them.
        found: the outcome of each, by its id.
        notes: remarks about an edit, by its id.
    """
    lines = [
        INTRODUCTION,
        "| edits | number | on the tree as it is | after `witness` | wrong after it |",
        "|---|---|---|---|---|",
    ]
    for kind, title in TITLES.items():
        chosen = [each for each in edits if each.kind is kind and each.id in found]
        before, after = (_counts([found[each.id][when] for each in chosen]) for when in ("before", "after"))
        wrong = sum(each.is_wrong(found[each.id]["after"]) for each in chosen)
        lines.append(f"| {title.partition(':')[0].lower()} | {len(chosen)} | {before} | {after} | {wrong} |")
    unseen = [each for each in edits if each.id not in found]
    if known := [each.id for each in unseen if notes.get(each.id, "").startswith("**WRONG**")]:
        lines += ["", f"Not counted, and wrong when they were tried: {', '.join(known)} ([below](#without-a-receipt))."]
    for kind, title in TITLES.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| edit | of | in | before it | as it is | after `witness` |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            _row(each, found[each.id], notes.get(each.id)) for each in edits if each.kind is kind and each.id in found
        ]
    if unseen:
        lines += [
            "",
            "## Without a receipt",
            "",
            f"{len(unseen)} edits have none; a note has the result of `witness` where it is known.",
        ]
        lines += [
            "",
            *(
                f"- {each.id}, of {each.overlay} in {each.tree.name}. {notes.get(each.id, '')}".rstrip()
                for each in unseen
            ),
        ]
    return "\n".join(lines) + "\n"


def _counts(decisions: Sequence[str]) -> str:
    return ", ".join(f"{number} {decision}" for decision, number in sorted(Counter(decisions).items())) or "none"


def _row(edit: Edit, found: Mapping[str, Any], note: str | None) -> str:
    reason = _cell(found["reason"])[:240]
    wrong = "**WRONG** " if edit.is_wrong(found["after"]) else ""
    more = f" {_cell(note)}" if note else ""
    name = f"{edit.id}: {edit.why}.{more}"
    return (
        f"| {name} | {edit.overlay} | {edit.tree.name} | {found['unedited']} | {found['before']} | "
        f"{wrong}{found['after']}: {reason} |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
