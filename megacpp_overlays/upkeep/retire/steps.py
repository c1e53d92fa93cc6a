"""The steps that a person takes after the checklist of a retirement: commands to run, texts to edit, the commit."""

from __future__ import annotations

import shlex

from megacpp_overlays.upkeep.retire.preparation import RetirementOutcome

_IN_STEP = (
    "python scripts/list_overlays.py",
    "megacpp-overlays ledger --write RETIREMENT.md",
    "megacpp-overlays receipts --sync",
    "make matrix",
)
_LONGEST = 200


def steps(outcome: RetirementOutcome) -> str:
    """Return the remaining steps, in the order in which they must be done."""
    left, entry = outcome.leavings, outcome.entry
    notes = f"packs/{left.pack.name}/README.md"
    guard = "" if left.siblings else "the pack becomes class `regression guard`, lifecycle state `retired`; "
    edits = [
        f"{notes}: {guard}`{entry.id}` retired {entry.date}, {entry.distribution} {entry.version}",
        f"CHANGELOG.md: Overlay `{entry.id}` (pack {entry.pack:02}): {reason(outcome)}",
    ]
    blocks = [
        ("Remove:", [f"git rm {shlex.join(left.files)}"]),
        ("Remove as well, unless others use them, because nothing else names them:", left.unused),
        ("Edit:", edits),
        ("Edit, because these lines name the removed overlay or its files:", map(shortened, left.mentions)),
        ("Bring in step:", _IN_STEP),
        ("Then run `make test`, and commit:", [_commit(outcome)]),
    ]
    shown = [(heading, list(lines)) for heading, lines in blocks]
    return "\n\n".join("\n".join([heading, *(f"  {line}" for line in lines)]) for heading, lines in shown if lines)


def reason(outcome: RetirementOutcome) -> str:
    """Return the reason for the retirement of an overlay, for the changelog and the commit."""
    entry = outcome.entry
    text = f"{entry.distribution} {entry.version} is right without it. Its reproducer stays as a regression guard."
    lanes = ", ".join(f"`{lane.name}` ({lane.pinned})" for lane in outcome.unpatched)
    return f"{text} Unpatched from here on: {lanes}." if lanes else text


def message(outcome: RetirementOutcome) -> tuple[str, str]:
    """Return the subject and the body of the commit."""
    entry = outcome.entry
    subject = f"Retire {entry.id}: {entry.distribution} {entry.version} is right without it"
    body = (
        f"Shown on lane {outcome.lane}: the probe says FIXED, the overlay's own condition holds, and the reproducer of "
        f"pack {entry.pack:02} says BUG_NOT_PRESENT. {reason(outcome).partition('. ')[2]}"
    )
    return subject, body


def _commit(outcome: RetirementOutcome) -> str:
    return f"git add -A && git commit {' '.join(f'-m {shlex.quote(text)}' for text in message(outcome))}"


def shortened(text: str) -> str:
    """Return a line of at most 200 characters."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
