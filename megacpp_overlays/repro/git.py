"""Read-only runner of git, the only one in the package. It runs no hook, filter or helper program, and uses no network.

The settings of the repository and of the shell cannot change that. The repository is the one that a `.git` leads to, or a
bare repository that the caller named itself. A source tree may have files with the names of a bare repository's files:
their text is content, and no configuration. git checks the owner of a repository only when it searches for it, so it always
runs in a folder (`-C`) and never gets the repository's place as an argument.

The configuration of the user and of the system applies, so GIT_CONFIG_NOSYSTEM is not set: there the user, or the author of
a container's image, lists the trusted repositories of other owners (`safe.directory`), and a checkout that is mounted into a
container can be read in no other way. An attacker with write access to these files can run programs as the user anyway.
Programs that they name for git to run are left out all the same, like those that a repository names: settings of the command
line come last, and a filter or a driver is no part of the content of a commit.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from megacpp_overlays.errors import UpkeepError

_SAFE = (
    "--no-optional-locks",
    *("-c", "core.fsmonitor=false"),
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", "log.showSignature=false"),
)
_NO_PROTOCOL = "none"
"""The only protocol that is allowed. A partial clone would ask its network for missing objects."""
_TIMEOUT = 300.0

_READS_NO_FILE = frozenset({"cat-file", "config", "log", "ls-files", "ls-tree", "read-tree", "rev-parse"})
"""Commands that compare or write no content of a work tree, so no filter is run for them."""
_FILTERS = r"^filter\..*\.(clean|smudge|process|required)$"
_PLAIN_TEXT = ("--no-ext-diff", "--no-textconv")
_ONLY = {"status": ("--ignore-submodules=dirty",), **dict.fromkeys(("diff", "log", "show"), _PLAIN_TEXT)}
"""Options that a command always gets. git reads a submodule under the submodule's own configuration, and any configuration
may name a program that converts a file for display."""

_BARE = ("HEAD", "objects", "refs")
_IN_BARE = re.compile(
    r"[A-Z_]+|objects|refs|config|config\.worktree|description|hooks|info|branches|packed-refs|logs|worktrees|modules|lfs|shallow"
    r"|index|gc\.(log|pid)|rr-cache|svn|fsmonitor--daemon.*|.*\.lock"
)
"""Names of files and folders at the top of a bare repository, or of a `.git`."""


class GitError(UpkeepError):
    """Raised when git fails or is not installed; the text names the command and has git's first line.

    Attributes:
        output: every line that git wrote to stderr.
    """

    def __init__(self, text: str, output: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.output = output


def run(folder: Path, *arguments: str, settings: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> str:
    """Return the output of git, with paths decoded as `os.fsdecode` does; see `content`."""
    return os.fsdecode(content(folder, *arguments, settings=settings, variables=variables))


def content(
    folder: Path, *arguments: str, settings: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> bytes:
    """Return the output of git.

    Args:
        folder: where git looks for the repository.
        arguments: a git command.
        settings: `name=value` each; they override the configuration of the repository and of the user.
        variables: added to the environment.

    Raises:
        GitError: git cannot be run, gives no answer in time, or fails.
    """
    chosen = [word for setting in settings for word in ("-c", setting)]
    added = dict(variables or {})
    bare = "all" if _is_bare(folder, added.get("GIT_CEILING_DIRECTORIES")) else "explicit"
    command, *words = arguments
    if command not in _READS_NO_FILE:
        added |= _without_filters(folder, added)
    return _output(
        folder, ("-c", f"safe.bareRepository={bare}", *chosen, command, *_ONLY.get(command, ()), *words), added, command
    )


def _output(folder: Path, words: Sequence[str], variables: Mapping[str, str], name: str) -> bytes:
    try:
        done = subprocess.run(  # noqa: S603 - arguments, never a shell
            ["git", "-C", str(folder), *_SAFE, *words],  # noqa: S607 - whichever git the user has
            env={**_environment(), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT,
        )
    except FileNotFoundError as error:
        raise GitError("git is not installed here") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {name} did not answer: {error}") from error
    if done.returncode:
        lines = os.fsdecode(done.stderr).strip().splitlines()
        raise GitError(f"git {name}: {lines[0] if lines else f'exit code {done.returncode}'}", tuple(lines))
    return done.stdout


def ask(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, without white space around it; None when git fails."""
    try:
        return run(folder, *arguments).strip()
    except GitError:
        return None


def _is_bare(folder: Path, ceiling: str | None) -> bool:
    """Return whether a folder is a bare repository, and no source tree with files of the same names.

    git itself takes the folder, or any parent folder that has these names, for a repository.

    Raises:
        GitError: git would take a source tree for a bare repository.
    """
    here = folder.resolve()
    for place in (here, *here.parents):
        if str(place) == ceiling or (place / ".git").is_file() or _is_repository(place / ".git"):
            return False
        if _is_repository(place):
            if place == here and all(map(_IN_BARE.fullmatch, os.listdir(place))):
                return True
            raise GitError(
                f"{place} has {', '.join(_BARE)} among other files, so it is no repository; nothing is asked there"
            )
    return False


def _is_repository(place: Path) -> bool:
    return all(map(os.path.lexists, (place / name for name in _BARE)))


def _without_filters(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables that remove the program of every configured filter, for all attributes."""
    asked = ("config", "--null", "--name-only", "--get-regexp", _FILTERS)
    try:
        listed = os.fsdecode(_output(folder, asked, variables, "config")).split("\0")[:-1]
    except GitError as error:
        if error.output:  # git prints nothing where no filter is configured
            raise
        return {}
    named = {name: "false" if name.endswith(".required") else "" for name in listed}
    rows = {f"GIT_CONFIG_KEY_{row}": name for row, name in enumerate(named)}
    rows |= {f"GIT_CONFIG_VALUE_{row}": value for row, value in enumerate(named.values())}
    return {**rows, "GIT_CONFIG_COUNT": str(len(named))}


def _environment() -> dict[str, str]:
    # GIT_DIR and similar variables, as in a hook, would lead git to another repository.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "LC_ALL": "C", "GIT_ALLOW_PROTOCOL": _NO_PROTOCOL, "GIT_NO_LAZY_FETCH": "1"}
