"""The one way to run git, to read: no hook, filter, helper program or network of a repository or of the shell has a say.

The repository is the one that a `.git` leads to, or a bare one that was named itself. A source tree may have files of the
names that a bare repository has: what they say is content, and no configuration. git looks at who owns a repository, so it
is always asked from a folder (`-C`) and never told where the repository is: that would pass the look by.

The configuration of the user and of the system is heeded, so GIT_CONFIG_NOSYSTEM is not set: there a person, or whoever
made the image of a container, says which repositories of other owners are trusted (`safe.directory`), and a checkout that
is mounted into a container can be read in no other way. Whoever can write these files can run programs for that person
anyway. What they name for git to run is left out all the same, as what a repository names is: settings of the command line
come last, and a filter or a driver of theirs is no part of what a commit says.
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
"""The only protocol that may be used. A partial clone would ask its network for what it lacks."""
_TIMEOUT = 300.0

_READS_NO_FILE = frozenset({"cat-file", "config", "log", "ls-files", "ls-tree", "read-tree", "rev-parse"})
"""Commands that compare or write no content of a work tree, so no filter is run for them."""
_FILTERS = r"^filter\..*\.(clean|smudge|process|required)$"
_PLAIN_TEXT = ("--no-ext-diff", "--no-textconv")
_ONLY = {"status": ("--ignore-submodules=dirty",), **dict.fromkeys(("diff", "log", "show"), _PLAIN_TEXT)}
"""Words that a command always gets: git looks into a submodule under that one's own configuration, and may ask a program of
any configuration what to show of a file."""

_BARE = ("HEAD", "objects", "refs")
_IN_BARE = re.compile(
    r"[A-Z_]+|objects|refs|config|config\.worktree|description|hooks|info|branches|packed-refs|logs|worktrees|modules|lfs|shallow"
    r"|index|gc\.(log|pid)|rr-cache|svn|fsmonitor--daemon.*|.*\.lock"
)
"""What lies at the top of a bare repository, or of a `.git`."""


class GitError(UpkeepError):
    """Raised when git fails or is not there; the text names the command and has git's first line.

    Attributes:
        output: every line of what git said on stderr.
    """

    def __init__(self, text: str, output: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.output = output


def run(folder: Path, *arguments: str, settings: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> str:
    """Return what git prints, paths decoded as `os.fsdecode` does; see `content`."""
    return os.fsdecode(content(folder, *arguments, settings=settings, variables=variables))


def content(
    folder: Path, *arguments: str, settings: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> bytes:
    """Return what git prints.

    Args:
        folder: where git looks for the repository.
        arguments: a git command.
        settings: `name=value` each, over what the repository and the user have.
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
    """Return what git prints, without white space around it; None when it fails."""
    try:
        return run(folder, *arguments).strip()
    except GitError:
        return None


def _is_bare(folder: Path, ceiling: str | None) -> bool:
    """Return whether a folder is a bare repository, and no source tree with files of the same names.

    git itself takes any folder on the way up for a repository that has these names.

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
    """Return variables that leave every filter that is configured, for whatever attribute, without a program."""
    asked = ("config", "--null", "--name-only", "--get-regexp", _FILTERS)
    try:
        listed = os.fsdecode(_output(folder, asked, variables, "config")).split("\0")[:-1]
    except GitError as error:
        if error.output:  # it says nothing where there is none
            raise
        return {}
    named = {name: "false" if name.endswith(".required") else "" for name in listed}
    rows = {f"GIT_CONFIG_KEY_{row}": name for row, name in enumerate(named)}
    rows |= {f"GIT_CONFIG_VALUE_{row}": value for row, value in enumerate(named.values())}
    return {**rows, "GIT_CONFIG_COUNT": str(len(named))}


def _environment() -> dict[str, str]:
    # GIT_DIR and its like, as in a hook, would answer for another repository.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "LC_ALL": "C", "GIT_ALLOW_PROTOCOL": _NO_PROTOCOL, "GIT_NO_LAZY_FETCH": "1"}
