"""The git checkout that this package is in: try a change on a copy of it, then take the change over whole or not at all."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays.errors import UpkeepError


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One file before and after; None where there is no such file."""

    path: str
    before: bytes | None
    after: bytes | None

    @property
    def what(self) -> str:
        """`added`, `removed` or `changed`."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    def diff(self) -> str:
        """Return the change as a unified diff."""
        old, new = (_lines(content) for content in (self.before, self.after))
        old_name = os.devnull if self.before is None else f"a/{self.path}"
        new_name = os.devnull if self.after is None else f"b/{self.path}"
        return "".join(f"{line}\n" for line in difflib.unified_diff(old, new, old_name, new_name, lineterm=""))


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a checkout to try a change on."""

    folder: Path
    taken: Mapping[str, bytes]
    """What was in each file when it was copied; the checkout may have moved on since."""

    def changes(self) -> tuple[Change, ...]:
        """Return what was done to the copy since it was made."""
        there = set(files_below(self.folder))
        pairs = {
            name: (self.taken.get(name), _content(self.folder / name)) for name in sorted(there | self.taken.keys())
        }
        return tuple(
            Change(path=name, before=before, after=after) for name, (before, after) in pairs.items() if before != after
        )


def _lines(content: bytes | None) -> list[str]:
    return (content or b"").decode(errors="backslashreplace").splitlines()


class WorkingTree:
    """The top folder of a checkout, and what is in it."""

    def __init__(self, root: Path) -> None:
        """Take the folder that holds the package.

        Raises:
            UpkeepError: it is not the top of a git checkout.
        """
        self.root = root.resolve()
        top = self._git("rev-parse", "--show-toplevel", check=False).strip()
        if not top or Path(top).resolve() != self.root:
            raise UpkeepError(
                f"{root} is no git checkout, so there is nothing to prepare a commit in; run the command with the "
                "package of a checkout: cd CHECKOUT && python -m megacpp_overlays"
            )

    def files(self) -> list[str]:
        """Return the files that git knows or would add, as they are on disk; not what belongs to a checkout within."""
        listed = self._git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        return sorted({name for name in listed if name and _is_file_or_link(self.root / name)})

    def modified(self, paths: Iterable[str] | None = None) -> list[str]:
        """Return which of these files, or of all, are not as they were committed; git's own two letters in front."""
        chosen = ["--", *(f":(literal){path}" for path in paths)] if paths is not None else []
        listed = self._git("status", "--porcelain", "--untracked-files=all", *chosen)
        return [line for line in listed.splitlines() if line]

    def copy(self, to: Path) -> Copy:
        """Copy the files, links as links."""
        taken = {}
        for name in self.files():
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.root / name, target, follow_symlinks=False)
            taken[name] = _content(target) or b""
        return Copy(to, taken)

    def take_over(self, changes: Sequence[Change]) -> None:
        """Make these changes, or none of them.

        Raises:
            UpkeepError: a file is not what it was when the change was made, or cannot be written; all is as before.
        """
        for change in changes:
            self._refuse_if_changed(change)
        done: dict[Change, int | None] = {}
        with contextlib.ExitStack() as drafts:
            try:
                written = [(change, self._draft(change, drafts)) for change in changes]
                for change, draft in written:
                    path = self.root / change.path
                    self._refuse_if_changed(change)
                    done[change] = path.stat().st_mode if change.before is not None else None
                    path.unlink() if draft is None else draft.replace(path)
            except BaseException as error:
                self._put_back(done)
                if isinstance(error, OSError):
                    raise UpkeepError(f"{error.filename}: {error.strerror}; everything is as it was") from error
                raise

    def _refuse_if_changed(self, change: Change) -> None:
        if _content(self.root / change.path) != change.before:
            raise UpkeepError(f"{change.path} was changed by somebody else meanwhile; nothing was done, try again")

    def _draft(self, change: Change, drafts: contextlib.ExitStack) -> Path | None:
        if change.after is None:
            return None
        path = self.root / change.path
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        drafts.callback(draft.unlink, missing_ok=True)
        draft.write_bytes(change.after)
        if change.before is not None:
            shutil.copymode(path, draft)
        return draft

    def _put_back(self, done: Mapping[Change, int | None]) -> None:
        for change, mode in done.items():
            path = self.root / change.path
            if _content(path) != change.after:
                continue  # it was not reached, or somebody has saved it since
            if change.before is None or mode is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(change.before)
                path.chmod(mode)

    def _git(self, *arguments: str, check: bool = True) -> str:
        # GIT_DIR and its like, as in a hook, would answer for another repository.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        try:
            done = subprocess.run(  # noqa: S603 - it only reads
                ["git", "-C", str(self.root), *arguments],  # noqa: S607 - whichever git the user has
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise UpkeepError(f"git cannot be run: {error.strerror}") from error
        if check and done.returncode:
            raise UpkeepError(f"git {arguments[0]} in {self.root}: {done.stderr.strip()}")
        return done.stdout


def files_below(folder: Path) -> Iterator[str]:
    """Yield the files and links below a folder, by their paths in it."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]  # what running the copy leaves behind
        links = [name for name in folders if Path(parent, name).is_symlink()]
        yield from (Path(parent, name).relative_to(folder).as_posix() for name in (*files, *links))


def _is_file_or_link(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _content(path: Path) -> bytes | None:
    """Return what is in a file, or where a link leads to."""
    if path.is_symlink():
        return os.readlink(path).encode()
    return path.read_bytes() if path.is_file() else None
