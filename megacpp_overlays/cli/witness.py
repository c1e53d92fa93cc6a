"""`megacpp-overlays witness`: prove here, by running its reproducer, that what looks repaired is repaired."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add, check_ids, check_timeout, packs_folder
from megacpp_overlays.loader import session
from megacpp_overlays.loader.witnesses import folder_of
from megacpp_overlays.repro import ending
from megacpp_overlays.repro.witnessing import Attempt, WitnessOptions, asked_for, prove, unproved

_TEXT = "Prove here, by running its reproducer on upstream alone, that what looks repaired is repaired, and keep that."
_MORE = """\
Without an ID it does so for every overlay and gate that looks repaired and has no witness that counts; with one, anew. Every
case that this host can run has to see no defect. What was proved is kept for this user and this environment, with the
hashes of the probe, of the reproducer and of every module of the upstream that was read or loaded, and counts until one
of them changes: the decision is then `retired`, and its reason begins with `witnessed`.
"""
_EXAMPLES = ("witness", "witness liger-flce-none-backward")
_CODES = {
    ExitCode.CLEAN: "everything that looks repaired was proved, or nothing looks repaired",
    ExitCode.FOUND: "something was not: a case shows the defect, failed, or cannot run on this host",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "witness", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("ids", metavar="ID", nargs="*", help="an overlay or a gate")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=900.0, help="for one case (default 900)")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Prove what looks repaired; return whether all of it was."""
    packs = packs_folder(arguments, parser)
    check_timeout(arguments, parser)
    current = session.current()
    check_ids(arguments.ids, current.overlays, parser)
    attempts = witness(
        current, WitnessOptions(packs=packs, settings=current.settings, timeout=arguments.timeout), arguments.ids
    )
    if arguments.json:
        print(json.dumps({"schema": 1, "witnesses": [_as_dict(each) for each in attempts]}, indent=2))
    else:
        print("\n".join(map(line, attempts)) or "nothing that is here looks repaired without being proved")
        if any(each.proved and each.cases for each in attempts):
            print(f"kept in {folder_of(current.settings)}")
    return all(each.proved for each in attempts)


def witness(current: session.Session, how: WitnessOptions, ids: Sequence[str] = ()) -> tuple[Attempt, ...]:
    """Prove what looks repaired, or what was named, and tell on stderr how that goes."""
    progress = functools.partial(print, file=sys.stderr, flush=True)
    how = WitnessOptions(packs=how.packs, settings=how.settings, timeout=how.timeout, progress=progress)
    with ending.by_exception():
        if ids:
            return asked_for(current.overlays, ids, how)
        return tuple(prove(current.overlays, unproved(current.overlays, how.settings), how))


def line(attempt: Attempt) -> str:
    """Return an attempt as one line."""
    word = "not proved" if not attempt.proved else "proved" if attempt.cases else "nothing to prove"
    return f"{word}: {attempt.overlay} on {attempt.target} | {attempt.reason}"


def _as_dict(attempt: Attempt) -> dict[str, object]:
    return {
        "id": attempt.overlay,
        "target": attempt.target,
        "proved": attempt.proved,
        "reason": attempt.reason,
        "cases": [{"case": name, "said": word} for name, word in attempt.cases],
    }
