"""Source trees that probes read: the text and syntax tree of a module, without importing it.

One probe serves three callers because all of them hand it a `SourceTree`:

    InstalledTree   the packages of this interpreter, and the files of modules that are loaded
    DirectoryTree   an unpacked tree or a source checkout     } both in `file_trees`,
    ArchiveTree     a wheel or a source distribution on disk  } which nothing at run time imports

Packages are located by asking the finders of the import system level by level. That runs no upstream code, while
`importlib.util.find_spec("a.b.c")` would execute `a` and `a.b`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

from megacpp_overlays.errors import OverlayError, SourceError
from megacpp_overlays.frozen import NamedTuple

if TYPE_CHECKING:
    from megacpp_overlays.source.bindings import Bindings

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_Answer = TypeVar("_Answer")

MOST_TEXT = 512 * 1024
"""Limit on the characters of a text that a probe reads. The longest module that a probe has read so far has 240,000."""
MOST_WORDS = 128 * 1024
"""Limit on the words and signs of a text that a probe reads, as `_words` counts them.

The longest module that a probe has read so far has 51,000 of them (`dynamic_context` of Megatron's main of 2026-08-22),
the longest of any release in the matrix 67,000 (`context_parallel` of Transformer Engine 2.20).

The limit bounds every walk of a probe, and so the time that an import waits for it. The interpreter bounds the nesting of
code, and raises where it is too deep.
"""
_TOO_DEEP = "is nested too deeply to be read"


class ModuleSource:
    """Source of one module: its text, syntax tree, bindings and definitions."""

    def __init__(self, name: str, path: str, text: str) -> None:
        self.name = name
        self.path = path
        self.text = text

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the text, to compare modules between ranks, hosts and versions."""
        import hashlib  # noqa: PLC0415 - not needed to arm

        return hashlib.sha256(self.text.encode()).hexdigest()

    @functools.cached_property
    def syntax(self) -> ast.Module:
        """The syntax tree.

        Raises:
            SourceError: this interpreter cannot parse the text, or it is longer than anything that a probe reads.
        """
        check_length(self.path, self.text)
        try:
            return ast.parse(self.text, filename=self.path)
        except SyntaxError as error:
            raise SourceError(f"{self.path}:{error.lineno}: cannot be parsed: {error.msg}") from error
        except ValueError as error:  # a null byte
            raise SourceError(f"{self.path}: cannot be parsed: {error}") from error
        except (RecursionError, MemoryError) as error:  # the parser raises MemoryError for its own stack
            raise SourceError(f"{self.path}: {_TOO_DEEP}") from error

    @functools.cached_property
    def bindings(self) -> Bindings:
        """Bindings of the names of the module.

        Raises:
            SourceError: see `syntax`.
        """
        from megacpp_overlays.source.bindings import Bindings  # noqa: PLC0415 - not needed to arm

        return Bindings(self.syntax)

    def find(self, symbol: str) -> ast.ClassDef | FunctionNode | None:
        """Return the one definition of a qualified name such as `Layer.forward`.

        Returns:
            None when no statement binds the name.

        Raises:
            SourceError: the name is defined or bound more than once, so the text alone cannot show the live binding; or it is
                bound by something else than a definition, such as an import, so its meaning is in another text.
        """
        found: ast.ClassDef | FunctionNode | None = None
        parts = symbol.split(".")
        for depth in range(1, len(parts) + 1):
            matches = self.bindings.definitions(".".join(parts[:depth]))
            if len(matches) > 1:
                raise SourceError(f"{self.path}: {symbol} is defined {len(matches)} times")
            if not matches:
                self.check_missing(".".join(parts[:depth]))
                return None
            found = matches[0]
            others = [node for node in self.bindings.of(".".join(parts[:depth])) if node is not found]
            if others:
                line = getattr(others[0], "lineno", None)
                raise SourceError(f"{self.path}:{line}: {symbol} is bound elsewhere, too")
        return found

    def defined(self, symbol: str) -> FunctionNode | None:
        """Return the one function or method that is defined under a name, ignoring other code that may set the name at run time.

        It is for callers that compare the definition with the live object; `function` is for callers that have the text alone.

        Returns:
            None where the name has no definition, or is a class.

        Raises:
            SourceError: the name is defined more than once.
        """
        found: ast.AST | None = None
        name = ""
        for part in symbol.split("."):
            name = f"{name}.{part}" if name else part
            matches = self.bindings.definitions(name)
            if len(matches) > 1:
                raise SourceError(f"{self.path}: {name} is defined {len(matches)} times")
            found = matches[0] if matches else None
        return found if isinstance(found, FunctionNode) else None

    def check_missing(self, symbol: str) -> None:
        """Check that a name without a definition is not bound here by an import, a star import or a module's `__getattr__`.

        Raises:
            SourceError: such code may bind the name.
        """
        binds = [*self.bindings.of(symbol), *([] if "." in symbol else self.bindings.of("__getattr__"))]
        if binds:
            line = getattr(binds[0], "lineno", None)
            raise SourceError(f"{self.path}:{line}: {symbol} is not defined here, but it may be bound here")

    def function(self, symbol: str) -> FunctionNode | None:
        """Return the definition of a function or method, or None when the name is no function here."""
        node = self.find(symbol)
        return node if isinstance(node, FunctionNode) else None


def check_length(path: str, text: str) -> None:
    """Check that a text is short enough for a probe to walk over it.

    Raises:
        SourceError: the text is too long.
    """
    if len(text) > MOST_TEXT:
        raise SourceError(f"{path} has {len(text):,} characters, more than the {MOST_TEXT:,} that a probe reads")
    if len(text) > MOST_WORDS // 3 and (words := _words(text)) > MOST_WORDS:  # a character counts three at most
        raise SourceError(f"{path} has {words:,} words and signs, more than the {MOST_WORDS:,} that a probe reads")


_IN_WORDS = bytes(each for each in range(256) if each >= 128 or chr(each).isalnum() or chr(each) in "_ \t\n\v\f\r")
"""Bytes of words and of white space; every other byte is a sign."""


def _words(text: str) -> int:
    """Return an upper bound on the words and signs of a text, comments included, in a millisecond for 150,000 characters.

    The nodes of the syntax are at most a small multiple of it; to count them would take twenty times as long.
    """
    raw = text.encode(errors="replace")
    return len(raw.split()) + 2 * len(raw.translate(None, _IN_WORDS))  # a sign may end a word


def parameters(function: FunctionNode) -> tuple[str, ...]:
    """Return the parameter names of a function in order, `*` and `**` marked as such."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [arg.arg for arg in args.kwonlyargs]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return tuple(names)


class ShippedFile(NamedTuple):
    """Text of a file that a package ships in addition to its modules, such as its C++ source."""

    path: str
    text: str


class SourceTree(Protocol):
    """Provider of module sources by dotted name."""

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module, or None when there is no such module here.

        Raises:
            SourceError: the module is there, but its text cannot be read.
        """


@runtime_checkable
class ShippingTree(SourceTree, Protocol):
    """Source tree that also provides files which are no modules."""

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file by its path in the folder of a package, or None when it or the package is not here.

        Raises:
            SourceError: the file is there, but it cannot be read.
        """


def shipped(tree: SourceTree, package: str, path: str) -> ShippedFile | None:
    """Return a file that a package ships, by its path in the folder of the package; None when there is none.

    Raises:
        SourceError: the file cannot be read, or is longer than a text that a probe reads; or this tree has modules only.
    """
    if not isinstance(tree, ShippingTree):
        raise SourceError(f"{package}/{path}: {type(tree).__name__} hands out modules only")
    file = tree.shipped(package, path)
    if file is not None:
        check_length(file.path, file.text)
    return file


class InstalledTree:
    """Source tree of this interpreter's packages. For a loaded module it reads the file that the module was loaded from."""

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of an importable module; imports nothing."""
        loaded = sys.modules.get(name)
        if isinstance(file := _attribute(loaded, "__file__"), str):
            return _read_python(name, Path(file))
        *parents, last = name.split(".")
        folders = _search_path(parents)
        for folder in folders if parents else ():
            if (path := _module_file(Path(folder), last)) is not None:
                return _read_python(name, path)
        return _found_by_finders(name, folders if parents else None)

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file in the folder of an importable package; imports nothing."""
        for folder in _search_path(package.split(".")):
            if (found := _read_text(Path(folder, path))) is not None:
                return found
        return None


def _attribute(loaded: object, name: str) -> Any:
    """Return an attribute of a loaded module, or None, without loading a lazy module; errors of a proxy are ignored."""
    try:
        return object.__getattribute__(loaded, name)
    except Exception:  # noqa: BLE001 - any object may be in the place of a module
        return None


def _search_path(parents: list[str]) -> list[str]:
    """Return the folders in which the import system searches modules of a package; imports nothing.

    Editable installs and `pkgutil.extend_path` decide it level by level, so each level is asked.
    """
    folders = list(sys.path)
    for depth in range(1, len(parents) + 1):
        name = ".".join(parents[:depth])
        if (known := _attribute(sys.modules.get(name), "__path__")) is not None:
            folders = list(known)
            continue
        try:
            spec = _look_for_spec(name, folders if depth > 1 else None)
        except (ImportError, KeyError):  # KeyError: a namespace package asks for its parent, which is not imported
            folders = [str(Path(folder, parents[depth - 1])) for folder in folders]
        else:
            folders = list(spec.submodule_search_locations or ()) if spec is not None else _no_folders(name, folders)
    return folders


def _no_folders(name: str, folders: Sequence[str]) -> list[str]:
    """Return no folders for a package that is in none of these folders.

    Raises:
        SourceError: one of the folders has an entry of the package's name that cannot be read.
    """
    last = name.rpartition(".")[2]
    for folder in folders:
        # Most packages that are searched when the session is armed are not installed; two system calls show that.
        if os.path.isdir(folder) and not os.path.lexists(os.path.join(folder, last)):
            continue
        if _is_there(path := Path(folder, last)) and not path.is_dir():
            raise SourceError(f"{name}: cannot read {path}, which is there")
    return []


def _found_by_finders(name: str, folders: Sequence[str] | None) -> ModuleSource | None:
    """Return a module that is in none of the package's folders: a top-level one, one of an editable install, one of an archive.

    Raises:
        SourceError: a finder has it, but not as a file of Python source.
    """
    try:
        spec = _look_for_spec(name, folders)
    except (ImportError, KeyError):  # see `_search_path`
        spec = None
    if spec is None:
        _no_folders(name, sys.path if folders is None else folders)
        return None
    if not spec.has_location and spec.submodule_search_locations is not None:
        return None  # a namespace, in which nothing is defined
    if not spec.has_location or spec.origin is None:
        raise SourceError(f"{name} is found by {type(spec.loader).__qualname__}, which names no Python source")
    return _read_python(name, Path(spec.origin))


def find_spec(
    name: str, path: Sequence[str] | None, target: ModuleType | None, *, but: object = None
) -> ModuleSpec | None:
    """Return the spec of a module from the finders of the import system, as an import does; None where no finder has it."""
    for finder in sys.meta_path:
        ask = getattr(finder, "find_spec", None)  # the import system, too, passes by a finder without it
        if finder is not but and ask is not None and (spec := ask(name, path, target)) is not None:
            return cast("ModuleSpec", spec)
    return None


_asking = threading.local()


def _look_for_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of a module whose parents need not be imported, and keep the finders from importing them.

    Raises:
        SourceError: no finder knows the module, and one failed.
        ImportError: no finder knows the module, and one needs its parents.
        KeyError: as ImportError.
    """
    parent = name.rpartition(".")[0]
    failure: Exception | None = None
    parts = name.split(".")
    missing = {".".join(parts[:depth]) for depth in range(1, len(parts))} - sys.modules.keys()
    before: frozenset[str] = getattr(_asking, "parents", frozenset())
    _asking.parents = before | missing
    try:
        for finder in list(sys.meta_path):
            if type(finder).__module__.partition(".")[0] == "wrapt" and parent and parent not in sys.modules:
                continue  # its hooks would import the parents of a watched module, which the import system does not ask for
            try:
                if (ask := getattr(finder, "find_spec", None)) is not None and (
                    spec := ask(name, path, None)
                ) is not None:
                    return cast("ModuleSpec", spec)
            except (ImportError, KeyError) as error:
                failure = failure or error
            except Exception as error:  # noqa: BLE001 - a third-party finder must not stop an import of this package
                failure = SourceError(f"{type(finder).__qualname__} does not say where {name} is: {error!r}")
    finally:
        _asking.parents = before
    if failure is not None:
        raise failure
    return None


def refuse_parents(name: str) -> None:
    """Refuse the import of a parent package by a finder that was asked for a spec; for the first finder on `sys.meta_path`.

    The finders of some tracers call `importlib.util.find_spec`, which imports all parents of a module.

    Raises:
        ModuleNotFoundError: the module is a parent of the module that this thread searches.
    """
    if name in getattr(_asking, "parents", ()):
        raise ModuleNotFoundError(f"{name} is only looked for, and not imported for that", name=name)


def readable(tree: SourceTree, name: str) -> ModuleSource | None:
    """Return the source of a module, or None when it is missing or cannot be read."""
    try:
        return tree.module(name)
    except OverlayError:
        return None


class CachedTree:
    """Source tree that reads each file and parses each module once; for decisions that are taken together."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._found: dict[str, ModuleSource | None] = {}
        self._shipped: dict[tuple[str, str], ShippedFile | None] = {}
        self._answers: dict[int, tuple[object, object]] = {}

    def module(self, name: str) -> ModuleSource | None:
        """Return the same source object for the same name."""
        if name not in self._found:
            self._found[name] = self._tree.module(name)
        return self._found[name]

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return the same file for the same path; see `shipped`."""
        if (package, path) not in self._shipped:
            self._shipped[package, path] = shipped(self._tree, package, path)
        return self._shipped[package, path]

    def answer(self, ask: Callable[[SourceTree], _Answer]) -> _Answer:
        """Return the answer of a probe about this tree; see `answer`."""
        if id(ask) not in self._answers:
            self._answers[id(ask)] = ask, ask(self)
        return cast("_Answer", self._answers[id(ask)][1])


class ParsedOnce:
    """Source tree that reads a file on each request, and parses it anew only where its text has changed.

    Several probes ask for one module, each when its own target is imported. A syntax tree is many times as large as its
    text, so only the last few are kept, and none after an audit.
    """

    KEPT = 12

    def __init__(self, tree: ShippingTree) -> None:
        self._tree = tree
        self._kept: dict[str, ModuleSource] = {}

    def module(self, name: str) -> ModuleSource | None:
        """Return the present source of a module; an unchanged one is parsed already."""
        found, kept = self._tree.module(name), self._kept.pop(name, None)
        if found is None:
            return None
        if kept is None or (kept.path, kept.text) != (found.path, found.text):
            kept = found
        self._kept[name] = kept
        for each in list(self._kept)[: -self.KEPT]:
            self._kept.pop(each, None)  # another thread may have been here
        return kept

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return the present text of a file."""
        return self._tree.shipped(package, path)

    def forget(self) -> None:
        """Drop all parsed modules."""
        self._kept.clear()


def answer(ask: Callable[[SourceTree], _Answer], tree: SourceTree) -> _Answer:
    """Return the answer of a probe about a tree; a `CachedTree` asks each probe once, also for probes that build on it."""
    return tree.answer(ask) if isinstance(tree, CachedTree) else ask(tree)


_COMPILED_SUFFIXES = (*EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES)


def _module_file(folder: Path, name: str) -> Path | None:
    """Return the file that a module is loaded from, source before compiled files, or None when there is none."""
    stems = (folder / name / "__init__", folder / name)
    for suffix in (*SOURCE_SUFFIXES, *_COMPILED_SUFFIXES):
        for stem in stems:
            if _is_there(path := stem.with_name(f"{stem.name}{suffix}")):
                return path
    return None


def _is_there(path: Path) -> bool:
    """Return whether a path is a file, or may be one and cannot be read, such as a link that leads nowhere."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return leads_nowhere(path)
    except (OSError, ValueError):
        return True


def leads_nowhere(path: Path) -> bool:
    """Return whether a path, or a folder on its way, is a broken link: to itself, or to a file that is gone."""
    return any(os.path.islink(each) and not os.path.exists(each) for each in (path, *path.parents))


def _read_text(path: Path) -> ShippedFile | None:
    from megacpp_overlays import files  # noqa: PLC0415 - not needed to arm

    try:
        return ShippedFile(str(path), files.read(path).decode(errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error


def _read_python(name: str, path: Path) -> ModuleSource:
    if path.suffix != ".py":
        raise SourceError(f"{name} is loaded from {path}, which has no Python source")
    from megacpp_overlays import files  # noqa: PLC0415 - not needed to arm

    try:
        raw = files.read(path)
    except OSError as error:
        raise SourceError(f"{name}: cannot read {path}: {error.strerror}") from error
    return ModuleSource(name, str(path), decoded(str(path), raw))


def decoded(path: str, raw: bytes) -> str:
    """Return the text of a Python file, decoded by the encoding that its first lines declare.

    Raises:
        SourceError: the file cannot be decoded.
    """
    try:
        return importlib.util.decode_source(raw)
    except (SyntaxError, ValueError, LookupError) as error:  # LookupError: a codec that is none of text
        raise SourceError(f"{path}: cannot be decoded: {error}") from error
