"""`megacpp-overlays status`: print whether Pythons of this environment start armed, proved by starting one."""

from __future__ import annotations

import argparse
import os
import sys

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader.settings import CHILDREN, this_environment
from megacpp_overlays.processes import startup_file

_TEXT = "Say whether every Python of this environment is armed at its start, and prove it by starting one."
_EXAMPLES = ("status",)
_CODES = {
    ExitCode.CLEAN: "armed: by the file of `enable`, which was proved, or by the variables of `env`",
    ExitCode.FOUND: "a start-up file is there that does not arm, or not as this copy of the package writes it",
    ExitCode.NOTHING_HERE: "not armed: nothing was enabled",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    add(commands, "status", _TEXT, examples=_EXAMPLES, codes=_CODES).set_defaults(run=run)


def run(_: argparse.Namespace) -> ExitCode:
    """Print how Pythons of this environment are armed; return the exit code."""
    print(f"environment: {sys.executable}, {this_environment()}")
    found = startup_file.found()
    for file in found[1:]:
        print(f"not used: {file.path}, because {found[0].path} is executed first")
    if found:
        return _of_file(found[0])
    if arms_by_variables():
        print(
            f"armed by variables: PYTHONPATH and {CHILDREN}; a process with a PYTHONPATH of its own, -I or -E is not armed"
        )
        return ExitCode.CLEAN
    print("not armed: `megacpp-overlays enable` arms every Python of this environment")
    return ExitCode.NOTHING_HERE


def _of_file(file: startup_file.StartupFile) -> ExitCode:
    if not file.is_ours:
        print(
            f"edited, or of another copy: {file.path} leads to {file.package}, and this is {startup_file.PACKAGE}; "
            "run `megacpp-overlays enable` to write it anew"
        )
        return ExitCode.FOUND
    if why := startup_file.not_armed(file.path):
        print(f"not armed: {file.path} is there, but {why}; run `megacpp-overlays enable` to write it anew")
        return ExitCode.FOUND
    print(f"armed by file: {file.path}; proved by starting `{sys.executable} -I`")
    return ExitCode.CLEAN


def arms_by_variables() -> bool:
    """Return whether a Python of this environment that inherits the variables of this process is armed."""
    from megacpp_overlays.processes.children import STARTUP  # noqa: PLC0415 - it brings multiprocessing

    leads = STARTUP in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return leads and os.environ.get(CHILDREN, "").strip() == this_environment()
