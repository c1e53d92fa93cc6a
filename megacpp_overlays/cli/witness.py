"""`megacpp-overlays witness`: run reproducers on upstream code that probes do not recognise, and keep the verdicts."""

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
from megacpp_overlays.repro.forked import ForkServers
from megacpp_overlays.repro.witnessing import (
    Attempt,
    WitnessOptions,
    asked_for,
    confirm,
    confirmation,
    found_here,
    prove,
    recognised,
    unproved,
)

_TEXT = "Run the reproducers of unproved overlays, on upstream alone and with seams, and keep their verdicts."
_MORE = """\
Without an ID the command proves every unproved overlay, and every gate that is not recognised; with IDs it proves those anew. With
`--all` it then runs the cases of everything that is recognised, too, and says where behaviour is otherwise; that keeps nothing. Each
case that this host can run measures upstream alone. If no case shows the defect, the decision becomes `retired`, or `absent`. If
one does, the seams that can be placed are installed in a process of their own: if no case shows the defect then, and neighbour
cases are the same, the decision becomes `active`. The reason of such a decision begins with `witnessed`. The verdict is kept for
this user and this environment, with the hashes of the probe, the reproducer, the seams and every module of the upstream that was
read or loaded, and counts until one of them changes.
"""
_EXAMPLES = ("witness", "witness liger-flce-none-backward", "witness --all --workers 8")
_CODES = {
    ExitCode.CLEAN: "everything that is unproved was proved, or nothing is",
    ExitCode.FOUND: "something was not: a case shows a defect that is not repaired, failed, cannot run here, or contradicts a probe",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "witness", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("ids", metavar="ID", nargs="*", help="an overlay or a gate")
    parser.add_argument("--all", action="store_true", help="run the cases of recognised overlays and gates as well")
    parser.add_argument("--of", metavar="DISTRIBUTION", help="only overlays of this distribution")
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
    """Return the default number of overlays that are proved at the same time: one for each core, 8 at most."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Prove the unproved overlays; return whether all of them were proved."""
    packs = packs_folder(arguments, parser)
    check_timeout(arguments, parser)
    current = session.current()
    check_ids(arguments.ids, current.overlays, parser)
    if arguments.workers < 1:
        parser.error("--workers: at least one is needed")
    how = WitnessOptions(packs=packs, settings=current.settings, timeout=arguments.timeout, workers=arguments.workers)
    if arguments.of not in {None, *(part.target.distribution for part in current.overlays)}:
        parser.error(f"--of {arguments.of}: no overlay is about it")
    if arguments.of and arguments.ids:
        parser.error("--of: name overlays, or a distribution")
    attempts = witness(current, how, arguments.ids, of=arguments.of, everything=arguments.all)
    if arguments.json:
        print(json.dumps({"schema": 1, "witnesses": [_as_dict(each) for each in attempts]}, indent=2))
    else:
        print("\n".join(map(line, attempts)) or "nothing that is here is unproved")
        if any(each.proved and each.cases and not each.confirms for each in attempts):
            print(f"{_total(attempts)}; kept in {folder_of(current.settings)}")
    return all(each.proved for each in attempts)


def witness(
    current: session.Session,
    how: WitnessOptions,
    ids: Sequence[str] = (),
    *,
    of: str | None = None,
    everything: bool = False,
) -> tuple[Attempt, ...]:
    """Prove the unproved overlays, or the named ones, with progress on stderr; return the result of each part.

    Args:
        current: the session of this process.
        how: options for running reproducers.
        ids: overlays to prove anew; empty for all that are unproved.
        of: distribution of the overlays; None for all.
        everything: whether to run also the cases of parts that probes recognise, of these ids or of all.
    """
    overlays = current.overlays
    with ending.by_exception(), ForkServers() as servers:
        how = replace(how, progress=functools.partial(print, file=sys.stderr, flush=True), servers=servers)
        found = found_here([part for part in overlays if not ids or part.id in ids], how.settings)
        sure = [
            part
            for part in (recognised(found, how.packs) if everything else ())
            if of in {None, part.target.distribution}
        ]
        confirmed = {part.id for part in sure}
        if ids:
            proved = [each for each in asked_for(overlays, ids, how) if each.overlay not in confirmed]
        else:
            parts = [part for part in unproved(found) if of in {None, part.target.distribution}]
            proved = [*prove(overlays, parts, how)]
        return (*proved, *confirm(overlays, sure, how))


_IN_WORDS = {
    Verdict.BROKEN: "broken and repaired",
    Verdict.FIXED: "right upstream",
    None: "not proved",
}


def _total(attempts: Sequence[Attempt]) -> str:
    """Return the number of parts by verdict, in words."""
    asked = [each for each in attempts if not each.confirms]
    counts = Counter(attempt.verdict for attempt in asked if attempt.cases or not attempt.proved)
    return ", ".join(f"{counts[verdict]} {words}" for verdict, words in _IN_WORDS.items() if counts[verdict])


def line(attempt: Attempt) -> str:
    """Return an attempt as one line."""
    if attempt.confirms:
        return f"{confirmation(attempt)}: {attempt.overlay} | {attempt.reason}"
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
        "confirms": attempt.confirms,
        "confirmed": attempt.is_confirmed,
        "cases": [{"case": name, "said": word} for name, word in attempt.cases],
    }
