"""`megacpp-overlays symptom WORDS`: find the overlay whose defect a user describes, and print the next step."""

from __future__ import annotations

import argparse
import json
import sys

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import overview, quick, session
from megacpp_overlays.model import Decision, Record
from megacpp_overlays.upkeep import symptoms
from megacpp_overlays.upkeep.symptoms import FoundSymptom

_TEXT = "Find the overlay whose defect has a symptom, by words such as those of an experiment log, and print its state here."
_EXAMPLES = (
    "symptom grad_norm is 0",
    "symptom loss jumps after resume",
    "symptom 'replicas drift'",
    "symptom --json out of memory in sparse attention",
)
_CODES = {
    ExitCode.CLEAN: "at least one overlay has such a symptom",
    ExitCode.NOTHING_HERE: "none has",
}
_HERE = {
    Decision.ACTIVE: "broken here, and an armed process repairs it",
    Decision.RETIRED: "right here: look elsewhere",
    Decision.ABSENT: "nothing here has this defect",
    Decision.DISABLED: "off here: {reason}",
    Decision.GATED: "the combination is here: {reason}",
    Decision.UNPROVED: "not known here: `megacpp-overlays witness {id}` runs its reproducer",
    Decision.CONFLICT: "not recognised here: {reason}",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "symptom", _TEXT, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("words", metavar="WORD", nargs="+", help="a word of the symptom")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Print the overlays that the words may be about; return the exit code."""
    current = session.current()
    query = " ".join(arguments.words)
    found = symptoms.search(query, current.overlays)
    ids = [each.overlay.id for each in found]
    decided = quick.audit(current.overlays, current.settings, ids).decisions if found else ()
    here = {record.overlay.id: record for record in decided}
    if arguments.json:
        print(json.dumps([_as_dict(each, here[each.overlay.id]) for each in found], indent=2))
    elif found:
        print(
            "\n".join(
                line for number, each in enumerate(found, 1) for line in _lines(number, each, here[each.overlay.id])
            )
        )
        print(f"next: megacpp-overlays explain {ids[0]}; megacpp-overlays audit --quick")
    else:
        print(
            f"megacpp-overlays: no overlay has a symptom like {query!r}; docs/symptoms.md lists all of them, and "
            "`megacpp-overlays audit --quick` lists the defects of the installed packages",
            file=sys.stderr,
        )
    return ExitCode.CLEAN if found else ExitCode.NOTHING_HERE


def _as_dict(match: FoundSymptom, record: Record) -> dict[str, object]:
    return {
        "id": match.overlay.id,
        "symptom": match.symptom,
        "score": round(match.score, 3),
        "decision": record.decision.value,
        "defect": match.overlay.breaks,
    }


def _lines(number: int, match: FoundSymptom, record: Record) -> list[str]:
    overlay = match.overlay
    version = f" {record.version}" if record.version else ""
    here = _HERE[record.decision].format(reason=record.reason, id=overlay.id)
    rows = [f"symptom: {match.symptom}", f"defect: {overlay.breaks}", f"{overlay.target.distribution}{version}: {here}"]
    return [
        f"{number}. {overlay.id} (pack {overlay.pack:02})",
        *(line for row in rows for line in overview.wrapped(row, "     ", "       ")),
    ]
