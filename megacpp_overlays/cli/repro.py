"""`megacpp-overlays repro NN`: run the reproducer of an upstream problem, without its overlay and with all overlays."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add, check_ids, packs_folder
from megacpp_overlays.loader import session
from megacpp_overlays.repro import ending, inventory, receipts, runner
from megacpp_overlays.repro.case import Case, PackError
from megacpp_overlays.repro.manifest import ManifestError
from megacpp_overlays.repro.transcript import Transcript

_TEXT = "Run a pack's reproducer: each case in a fresh process without its overlay, then in one with every overlay."
_EXAMPLES = ("repro --list", "repro 9", "repro 22 --tree ../Megatron-LM", "repro 9 --keep packs")
_CODES = {
    ExitCode.CLEAN: "something was earned (BUG_REPRODUCED and FIX_VALIDATED, or the pack's own word for that, or "
    "BUG_NOT_PRESENT) and nothing failed; other cases may be BLOCKED",
    ExitCode.FOUND: "something failed: no fix, a crash, or a probe and a behaviour that disagree",
    ExitCode.NOTHING_HERE: "nothing ran: every case is BLOCKED on this host",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "repro", _TEXT, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("pack", metavar="NN", nargs="?", help="number of the pack, or the id of its overlay")
    parser.add_argument("--list", action="store_true", help="list the packs and their cases, and run nothing")
    parser.add_argument("--case", metavar="NAME", action="append", help="run only this case; can be repeated")
    parser.add_argument("--tree", metavar="PATH", type=Path, help="use the packages in this folder, such as a checkout")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="add a receipt to this folder of packs")
    parser.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=900.0, help="for one process (default 900)")
    parser.add_argument("--verbose", action="store_true", help="print the output of the processes, too")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command; return its exit code."""
    folder = packs_folder(arguments, parser)
    if arguments.list and arguments.pack is None:
        for each in inventory.list_packs(folder):
            _list(each)
        return 0
    if arguments.pack is None:
        parser.error("which pack? give its number, the id of an overlay, or --list")
    arguments.number = _number(arguments.pack, parser)
    if arguments.tree is not None and not arguments.tree.is_dir():
        parser.error("--tree: there is no such folder")
    if arguments.tree is not None and os.pathsep in str(arguments.tree.resolve()):
        parser.error(f"--tree: a path with {os.pathsep!r} cannot be on the path of a process")
    try:
        pack = inventory.find(folder, arguments.number)
        if arguments.list:
            _list(pack)
            return 0
        overlays = session.current().overlays
        kept = receipts.prepare(arguments.keep, pack, overlays) if arguments.keep else None  # before hours of runs
        job = runner.Job(
            reproducer=pack.reproducer,
            cases=_chosen(inventory.load_cases(pack.reproducer), arguments.case),
            overlays=overlays,
            command=_command(arguments),
            tree=arguments.tree,
            timeout=arguments.timeout,
        )
        roots = [arguments.tree.resolve()] if arguments.tree else []
        transcript = Transcript(roots, functools.partial(print, flush=True), verbose=arguments.verbose)
        with ending.by_exception():
            stamp, code = runner.run(job, transcript)
    except (PackError, ManifestError) as error:
        parser.error(str(error))
    if kept is not None:
        log = receipts.keep(arguments.keep, kept, pack, stamp, transcript.text, job.command)
        print(f"kept: {log}")
    return code


def _number(text: str, parser: argparse.ArgumentParser) -> int:
    """Return the number of a pack, given as that or as the id of its overlay; report anything else as wrong usage."""
    if text.isdecimal():
        return int(text)
    overlays = session.current().overlays
    check_ids([text], overlays, parser)
    return next(each.pack for each in overlays if each.id == text)


def _list(pack: inventory.Pack) -> None:
    print(pack.name)
    if not pack.reproducer.is_file():
        print("  no reproduce.py yet")
        return
    for case in inventory.load_cases(pack.reproducer):
        about = f"overlay {case.overlay}" if case.overlay else f"claim: {case.claim}"
        print(f"  {case.name}: {about}, {case.device}")


def _chosen(cases: Sequence[Case], names: Sequence[str] | None) -> tuple[Case, ...]:
    return tuple(cases) if not names else tuple(inventory.choose(cases, name) for name in dict.fromkeys(names))


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line that a receipt quotes."""
    words = ["megacpp-overlays", "repro", str(arguments.number)]
    for name in arguments.case or ():
        words += ["--case", name]
    words += ["--tree", "PATH"] if arguments.tree else []
    return shlex.join(words)
