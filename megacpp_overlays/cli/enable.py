"""`megacpp-overlays enable`: write the start-up file that arms every Python of this environment."""

from __future__ import annotations

import argparse
import sys

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import session
from megacpp_overlays.processes import startup_arming, startup_file

_TEXT = "Arm every Python of this environment: write a .pth file into its site-packages, and start a Python that shows that it works."
_MORE = """\
The file arms each process before its first line, whatever PYTHONPATH is and under -I and -E, too. A wrong setting ends the
process. Only -S, which leaves site-packages out as well, is not reached, nor is a virtual environment without
--system-site-packages: enable there. Run `disable` before `pip uninstall`: with the file and without the package no Python of
the environment starts.
"""
_EXAMPLES = ("enable", "enable --site      # the Python of an image, which is in no virtual environment")
_CODES = {
    ExitCode.CLEAN: "enabled, now or before",
    ExitCode.USAGE: "wrong usage, a setting that is not known, or a Python of no environment and no --site",
    ExitCode.NOT_CHECKED: "the file cannot be written, or a Python does not start armed with it; it was taken back",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "enable", _TEXT, examples=_EXAMPLES, codes=_CODES, more=_MORE)
    parser.add_argument(
        "--site",
        action="store_true",
        help="also where this Python is in no virtual or conda environment: every program of the host that it runs is armed",
    )
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Write the file; print its path and the package that it leads to.

    Raises:
        SettingsError: a setting of this environment is not known, so that every Python would end.
        StartupFileError: a Python with the file does not start armed.
    """
    if not arguments.site and not startup_file.is_environment():
        parser.error(
            f"{sys.executable} is in no virtual or conda environment, and other programs of this host run on it: "
            "say --site to arm all of them, as in an image"
        )
    session.current()  # reads every setting
    before = {each.path: each.text for each in startup_file.found()}
    file = startup_file.enable()
    if before.get(file.path) == file.text:
        print(f"enabled already: {file.path} arms every Python of this environment with {startup_file.PACKAGE}")
    else:
        led_to = f", in place of {was}" if (was := _package(before.get(file.path), file)) else ""
        print(f"enabled: {file.path} arms every Python of this environment with {startup_file.PACKAGE}{led_to}")
    for other in startup_arming.other_copies():
        print(
            f"PYTHONPATH leads to another copy, {other}, which is not used: `megacpp-overlays disable` first, then enable it"
        )
    print("take it back with: megacpp-overlays disable")
    return True


def _package(text: str | None, file: startup_file.StartupFile) -> str:
    return file._replace(text=text).package if text is not None else ""
