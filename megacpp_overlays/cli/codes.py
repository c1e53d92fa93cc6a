"""Exit codes of all commands. Each has one meaning, so that a job can act on it without reading the output."""

from __future__ import annotations

import enum

from megacpp_overlays.errors import ActivationError, MissingExtraError, OverlayError, SettingsError


class ExitCode(enum.IntEnum):
    """Exit code of a command."""

    CLEAN = 0
    FOUND = 1
    USAGE = 2
    NOTHING_HERE = 3
    NOT_AS_ASKED = 4
    NOT_CHECKED = 5
    MISSING_EXTRA = 6
    OLD = 7
    CLOSED_OUTPUT = 141


MEANINGS = {
    ExitCode.CLEAN: "clean: nothing to do, nothing wrong",
    ExitCode.FOUND: "a conflict, a failed check, or something to do",
    ExitCode.USAGE: "wrong usage, or a setting that is not known",
    ExitCode.NOTHING_HERE: "nothing is here that the command could be about, so nothing was looked at",
    ExitCode.NOT_AS_ASKED: "a decision is not one that `--require` or `--expect` allows",
    ExitCode.NOT_CHECKED: "it could not be checked or done: a file, an environment or a network does not answer",
    ExitCode.MISSING_EXTRA: "a library is missing that only this command needs; the message says how to install it",
    ExitCode.OLD: "done, with nothing to do, on saved answers of which some are older than `--max-age`",
    ExitCode.CLOSED_OUTPUT: "the reader closed the output; a shell gives this code to a command that SIGPIPE ended",
}
"""Meanings of the exit codes, as in the table of docs/commands.md."""


def of(error: OverlayError) -> ExitCode:
    """Return the code of a command that ended with an error."""
    if isinstance(error, SettingsError):
        return ExitCode.USAGE
    if isinstance(error, MissingExtraError):
        return ExitCode.MISSING_EXTRA
    return ExitCode.FOUND if isinstance(error, ActivationError) else ExitCode.NOT_CHECKED
