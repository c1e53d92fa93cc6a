"""`megacpp-overlays witness`: run reproducers on what probes do not recognise here, and keep the verdicts that they earn."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add, check_ids, check_timeout, packs_folder
from megacpp_overlays.loader import session
from megacpp_overlays.loader.witnesses import folder_of
from megacpp_overlays.model import Verdict
from megacpp_overlays.repro import ending
from megacpp_overlays.repro.witnessing import Attempt, WitnessOptions, asked_for, prove, unproved

_TEXT = "Run the reproducers of unproved overlays, on upstream alone and with seams, and keep their verdicts."
_MORE = """\
Without an ID the command proves every unproved overlay, and every gate that is not recognised; with IDs it proves those anew. Each
case that this host can run measures upstream alone. If no case shows the defect, the decision becomes `retired`, or `absent`. If
one does, the seams that can be placed are installed in a process of their own: if no case shows the defect then, and neighbour
cases are the same, the decision becomes `active`. The reason of such a decision begins with `witnessed`. The verdict is kept for
this user and this environment, with the hashes of the probe, the reproducer, the seams and every module of the upstream that was
read or loaded, and counts until one of them changes.
"""
_EXAMPLES = ("witness", "witness liger-flce-none-backward", "witness --workers 8")
_CODES = {
    ExitCode.CLEAN: "everything that is unproved was proved, or nothing is",
    ExitCode.FOUND: "something was not: a case shows a defect that is not repaired, failed, or cannot run on this host",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "witness", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("ids", metavar="ID", nargs="*", help="an overlay or a gate")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        default=default_workers(),
        help="overlays that are proved at the same time (default: one for each core, 8 at most)",
    )
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=900.0, help="for one case (default 900)")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def default_workers() -> int:
    """Return how many overlays are proved at the same time where nobody says it: one for each core, 8 at most."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Prove what is unproved; return whether all of it was."""
    packs = packs_folder(arguments, parser)
    check_timeout(arguments, parser)
    current = session.current()
    check_ids(arguments.ids, current.overlays, parser)
    if arguments.workers < 1:
        parser.error("--workers: at least one is needed")
    how = WitnessOptions(packs=packs, settings=current.settings, timeout=arguments.timeout, workers=arguments.workers)
    attempts = witness(current, how, arguments.ids)
    if arguments.json:
        print(json.dumps({"schema": 1, "witnesses": [_as_dict(each) for each in attempts]}, indent=2))
    else:
        print("\n".join(map(line, attempts)) or "nothing that is here is unproved")
        if any(each.proved and each.cases for each in attempts):
            print(f"{_total(attempts)}; kept in {folder_of(current.settings)}")
    return all(each.proved for each in attempts)


def witness(current: session.Session, how: WitnessOptions, ids: Sequence[str] = ()) -> tuple[Attempt, ...]:
    """Prove what is unproved, or what was named, and tell on stderr how that goes."""
    how = replace(how, progress=functools.partial(print, file=sys.stderr, flush=True))
    with ending.by_exception():
        if ids:
            return asked_for(current.overlays, ids, how)
        return tuple(prove(current.overlays, unproved(current.overlays, how.settings), how))


_IN_WORDS = {
    Verdict.BROKEN: "broken and repaired",
    Verdict.FIXED: "right upstream",
    None: "not proved",
}


def _total(attempts: Sequence[Attempt]) -> str:
    """Return how many parts there are of each answer."""
    counts = Counter(attempt.verdict for attempt in attempts if attempt.cases or not attempt.proved)
    return ", ".join(f"{counts[verdict]} {words}" for verdict, words in _IN_WORDS.items() if counts[verdict])


def line(attempt: Attempt) -> str:
    """Return an attempt as one line."""
    proved = f"proved {attempt.verdict.value}" if attempt.verdict else "nothing to prove"
    word = proved if attempt.proved else "not proved"
    return f"{word}: {attempt.overlay} on {attempt.target} | {attempt.reason}"


def _as_dict(attempt: Attempt) -> dict[str, object]:
    return {
        "id": attempt.overlay,
        "target": attempt.target,
        "proved": attempt.proved,
        "verdict": attempt.verdict.value if attempt.verdict else None,
        "reason": attempt.reason,
        "cases": [{"case": name, "said": word} for name, word in attempt.cases],
    }
