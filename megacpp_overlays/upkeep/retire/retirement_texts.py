"""The texts of a checkout with one overlay less: each function takes the text of a file and returns it changed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader.retired import Retired
from megacpp_overlays.repro.manifest import CLASSES, STATES

WIDTH = 120
CHANGELOG_ORDER = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
"""Of the sections of a release, https://keepachangelog.com/en/1.1.0/."""

_UNRELEASED = "## [Unreleased]"


def with_removal(text: str, entry: str) -> str:
    """Return a changelog with an entry under Removed of what is not released yet; headings are made where missing."""
    lines = text.rstrip("\n").split("\n")
    item = textwrap.fill(entry, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    if not any(line.startswith(_UNRELEASED) for line in lines):
        first = next((number for number, line in enumerate(lines) if line.startswith("## ")), len(lines))
        lines[first:first] = [_UNRELEASED, ""] if first < len(lines) else ["", _UNRELEASED]
    start = next(number for number, line in enumerate(lines) if line.startswith(_UNRELEASED)) + 1
    end = next((n for n in range(start, len(lines)) if lines[n].startswith("## ")), len(lines))
    section = "\n".join(lines[start:end]).strip("\n")
    new = [*lines[:start], "", _with_removal(section, item), *([""] if end < len(lines) else []), *lines[end:]]
    return "\n".join(new) + "\n"


def _with_removal(section: str, item: str) -> str:
    blocks = [block.strip("\n") for block in re.split(r"^(?=### )", section, flags=re.MULTILINE) if block.strip("\n")]
    heading = "### Removed"
    for number, block in enumerate(blocks):
        if block.split("\n", 1)[0].rstrip() == heading:
            blocks[number] = f"{block}\n{item}"
            return "\n\n".join(blocks)
    later = {f"### {name}" for name in CHANGELOG_ORDER[CHANGELOG_ORDER.index("Removed") + 1 :]}
    place = next((n for n, block in enumerate(blocks) if block.split("\n", 1)[0].rstrip() in later), len(blocks))
    blocks.insert(place, f"{heading}\n\n{item}")
    return "\n\n".join(blocks)


def without_row(text: str, overlay_id: str) -> str:
    """Return the README without the row of an overlay in the table `What is in it`."""
    head, heading, rest = text.partition("\n## What is in it\n")
    section, next_heading, tail = rest.partition("\n## ")
    kept = [line for line in section.split("\n") if not line.startswith(f"| `{overlay_id}` |")]
    return head + heading + "\n".join(kept) + next_heading + tail


def of_pack(text: str, gone: Retired, left: Sequence[str]) -> str:
    """Return the notes of a pack without an overlay; a pack that has none left becomes a regression guard.

    Args:
        text: its README.
        gone: the overlay.
        left: ids of the overlays that the pack still has.

    Raises:
        UpkeepError: the notes do not say their class or lifecycle state.
    """
    if not left:
        changes = (("class", CLASSES, "regression guard"), ("lifecycle state", STATES, "retired"))
        for label, words, word in changes:
            value = rf"^(\W*{label}\W+)(?:{'|'.join(words)})\b"  # as the manifest reads it
            text, count = re.subn(value, rf"\g<1>{word}", text, count=1, flags=re.MULTILINE | re.IGNORECASE)
            if not count:
                raise UpkeepError(f"the notes of pack {gone.pack:02} do not say their {label}")
    sentence = f"`{gone.id}` retired {gone.date}, {gone.distribution} {gone.version}"
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if re.match(r"\|\s*Overlays?\s*\|", line) and f"`{gone.id}`" in line:
            lines[number] = _overlays_row(line, gone.id, sentence)
            break
    return "\n".join(lines)


def _overlays_row(line: str, overlay_id: str, sentence: str) -> str:
    """Return the row with the overlays of a pack, one of them gone: `a`, `b`; `c` retired 2026-11-21, ..."""
    label, cell = (part.strip() for part in line.strip().strip("|").split("|", 1))
    active, *earlier = (part.strip() for part in cell.split(";"))
    remaining = [part.strip() for part in active.split(",") if part.strip() and f"`{overlay_id}`" not in part]
    # What followed the id after a comma, such as "two parts", goes with the last overlay.
    remaining = remaining if any("`" in part for part in remaining) else []
    return f"| {label} | {'; '.join([', '.join(remaining) or 'none', *earlier, sentence])} |"


def reason(gone: Retired, unpatched: Sequence[str]) -> str:
    """Return why an overlay goes, for the changelog and the commit.

    Args:
        gone: the overlay.
        unpatched: lanes that lose it and may still need it.
    """
    text = f"{gone.distribution} {gone.version} is right without it. Its reproducer stays as a regression guard."
    lanes = f" Unpatched from here on: {', '.join(unpatched)}." if unpatched else ""
    return text + lanes


def message(gone: Retired, lane: str, why: str) -> tuple[str, str]:
    """Return the subject and the body of the commit."""
    subject = f"Retire {gone.id}: {gone.distribution} {gone.version} is right without it"
    body = (
        f"Shown on lane {lane}: the probe says FIXED, the overlay's own condition holds, and the reproducer of pack "
        f"{gone.pack:02} says BUG_NOT_PRESENT. {why.partition('. ')[2]}"
    )
    return subject, body
