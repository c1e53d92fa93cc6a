"""The one way to run git, to read: no hook, helper program or network of a repository or of the shell has a say in the answer."""

from __future__ import annotations

import os
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
    try:
        done = subprocess.run(  # noqa: S603 - arguments, never a shell
            ["git", "-C", str(folder), *_SAFE, *chosen, *arguments],  # noqa: S607 - whichever git the user has
            env={**_environment(), **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT,
        )
    except FileNotFoundError as error:
        raise GitError("git is not installed here") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {arguments[0]} did not answer: {error}") from error
    if done.returncode:
        lines = os.fsdecode(done.stderr).strip().splitlines()
        raise GitError(f"git {arguments[0]}: {lines[0] if lines else f'exit code {done.returncode}'}", tuple(lines))
    return done.stdout


def ask(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, without white space around it; None when it fails."""
    try:
        return run(folder, *arguments).strip()
    except GitError:
        return None


def _environment() -> dict[str, str]:
    # GIT_DIR and its like, as in a hook, would answer for another repository.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "LC_ALL": "C", "GIT_ALLOW_PROTOCOL": _NO_PROTOCOL, "GIT_NO_LAZY_FETCH": "1"}
