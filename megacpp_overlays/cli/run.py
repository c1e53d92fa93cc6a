"""`megacpp-overlays run LAUNCHER ...`: replace this process by `python LAUNCHER ...`, armed like its child processes.

Nothing of Python is emulated here. The environment is set and this process is replaced, so that arguments, exit code,
signals, process id, tracebacks, `sys.path[0]`, `__main__` and its pickles are those of a plain Python.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.errors import RequirementError
from megacpp_overlays.loader import settings

_TEXT = "Run a launcher with this package armed before its first line, in every Python process that it starts, too."
_USAGE = """megacpp-overlays run [--witness] [--audit FILE] [--verify-ranks] [--require ID=DECISION]...
                            [options of Python] (LAUNCHER | -m MODULE | -c CODE) [its arguments]"""
_MORE = """\
options, in front of those of Python; they apply to the processes that the launcher starts, too:
  --witness        first run the reproducers of all unproved overlays, as `megacpp-overlays witness` does, then start the
                   launcher; with MEGACPP_OVERLAYS=strict it ends if an overlay stays unproved
  --audit FILE     rank 0 leaves its audit in FILE as JSON before the first step of an optimizer, when ranks were compared,
                   and at the end with how often each seam was called
  --verify-ranks   compare the ranks, as megacpp_overlays.verify_ranks() does, at the end of init_process_group; ranks that do
                   not run the same code, or do not arrive, end there with an error that names them
  --require ID=DECISION
                   end with an error before the first step of an optimizer unless this was decided, or one of several with
                   commas between; may be repeated
"""
_REFUSED = {
    "-I": "ignores PYTHONPATH",
    "-E": "ignores PYTHONPATH",
    "-S": "does not run the code that arms a process at start-up",
}

_ANSWERED = {"-V", "--version", "-?", "--help-env", "--help-xoptions", "--help-all"}
"""Options that Python answers without a launcher."""

_AUDIT, _VERIFY, _REQUIRE, _WITNESS = "--audit", "--verify-ranks", "--require", "--witness"
_WITH_VALUE = MappingProxyType({_AUDIT: "FILE", _REQUIRE: "ID=DECISION"})
Option = tuple[str, ...]
"""One option of Python, with its value if it takes one."""
_EXAMPLES = (
    "run train.py --steps 10",
    "run -m torch.distributed.run --nproc-per-node 8 train.py",
    "run --witness train.py --steps 10",
    "run --audit audit.json --verify-ranks -m torch.distributed.run --nproc-per-node 8 train.py",
)
_CODES = {
    ExitCode.CLEAN: "that of the launcher, which takes the place of this process; so is every other",
    ExitCode.USAGE: "wrong usage: the launcher was not started",
    ExitCode.NOT_CHECKED: "the file of --audit cannot be written: the launcher was not started",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser. Words after it are not for argparse, so no character marks an option there."""
    parser = add(
        commands,
        "run",
        _TEXT,
        examples=_EXAMPLES,
        codes=_CODES,
        more=_MORE,
        usage=_USAGE,
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=lambda arguments: run(arguments.words, parser))


def run(words: Sequence[str], parser: argparse.ArgumentParser) -> bool:
    """Replace this process. Return only where help is asked for; wrong usage exits with 2.

    Raises:
        SettingsError: a setting in the environment is not known.
    """
    try:
        variables, has_to_prove, words = asked_of_us(words)
    except RequirementError as error:
        parser.error(str(error))
    options, program = split(words)
    if ("-h",) in options or ("--help",) in options:
        parser.print_help()
        return True
    if not program and not any(option[0] in _ANSWERED for option in options):
        parser.error("there is no launcher to run")
    before, _ = split(sys.orig_argv[1:])
    if refused := next((option[0] for option in (*before, *options) if option[0] in _REFUSED), None):
        parser.error(
            f"Python under {refused} {_REFUSED[refused]}: leave {refused} out, "
            "or run the launcher without this command and import megacpp_overlays in its first line"
        )
    if not sys.executable:
        parser.error("this Python does not know its own path: run the launcher with a Python that does")
    os.environ.update(variables)
    if has_to_prove:
        _prove()
    return _become([word for option in (*before, *options) for word in option] + program)


class LauncherOptions(NamedTuple):
    """Options of this command, in front of those of Python."""

    variables: dict[str, str]
    has_to_prove: bool
    """Whether `witness` runs before the launcher starts."""
    rest: list[str]
    """The other words."""


def asked_of_us(words: Sequence[str]) -> LauncherOptions:
    """Return the options in front of Python's, in any order, and the other words.

    Raises:
        RequirementError: an option has no value, or one that cannot be read.
    """
    asked: dict[str, str] = {}
    required: list[str] = []
    has_to_prove = False
    rest = list(words)
    while rest and (name := rest[0].partition("=")[0]) in {*_WITH_VALUE, _VERIFY, _WITNESS}:
        _, sign, value = rest.pop(0).partition("=")
        if name == _VERIFY:
            asked[settings.VERIFY_RANKS] = "on"
            continue
        if name == _WITNESS:
            has_to_prove = True
            continue
        if not sign and rest:
            value = rest.pop(0)
        if not value:
            raise RequirementError(f"{name}: {_WITH_VALUE[name]} is missing")
        if name == _AUDIT:
            asked[settings.AUDIT] = str(Path(value).absolute())
        else:
            required.append(value)
            asked[settings.REQUIRE] = " ".join(required)
    return LauncherOptions(asked, has_to_prove, rest)


def _prove() -> None:
    """Prove the unproved overlays, in one process of this host and user at a time; the others then find the verdicts."""
    from megacpp_overlays.cli import witness  # noqa: PLC0415 - the other commands do not need them
    from megacpp_overlays.loader import session, witnesses  # noqa: PLC0415
    from megacpp_overlays.repro import inventory  # noqa: PLC0415
    from megacpp_overlays.repro.witnessing import WitnessOptions  # noqa: PLC0415

    current = session.current()
    with witnesses.one_at_a_time(current.settings):
        how = WitnessOptions(packs=inventory.own_folder(), settings=current.settings, workers=witness.default_workers())
        for attempt in witness.witness(current, how):
            print(witness.line(attempt), file=sys.stderr)


def _become(words: Sequence[str]) -> NoReturn:
    from megacpp_overlays.loader import session  # noqa: PLC0415 - the other commands do not need them
    from megacpp_overlays.processes import first_step  # noqa: PLC0415
    from megacpp_overlays.processes.child_reports import write_receipts_that_are_asked_for  # noqa: PLC0415
    from megacpp_overlays.processes.children import child_environment  # noqa: PLC0415

    current = session.current()
    current.arm()  # it logs the waiting overlays; the launcher is its child and does not log them again
    write_receipts_that_are_asked_for(current)  # into a folder that children do not make
    if current.settings.audit:  # replaces the file of an earlier run, which must not be taken for this run's
        first_step.leave(Path(current.settings.audit), current.audit())

    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, **child_environment()})  # noqa: S606 - as asked


def split(words: Sequence[str]) -> tuple[list[Option], list[str]]:
    """Split the arguments of a Python into its own options, one by one, and the program with its arguments."""
    options: list[Option] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        word = rest.pop(0)
        if word.startswith("--"):
            options.append((word, *_take(rest)) if word == "--check-hash-based-pycs" else (word,))
            continue
        for at, letter in enumerate(word[1:], 1):
            tail = word[at + 1 :]
            if letter in "mc":
                return options, [word if at == 1 else f"-{letter}{tail}", *rest]
            if letter in "WX":
                options.append((f"-{letter}", *([tail] if tail else _take(rest))))
                break
            options.append((f"-{letter}",))
    return options, rest


def _take(rest: list[str]) -> list[str]:
    return [rest.pop(0)] if rest else []
