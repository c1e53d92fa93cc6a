"""What a probe sees: the text and syntax tree of a module, without importing it.

One probe serves three callers because all of them hand it a `SourceTree`:

    InstalledTree   the packages of this interpreter, and the files of modules that are loaded
    DirectoryTree   an unpacked tree or a source checkout     } both in `file_trees`,
    ArchiveTree     a wheel or a source distribution on disk  } which nothing at run time imports

Packages are located by asking the finders of the import system level by level, which runs no upstream code, while
`importlib.util.find_spec("a.b.c")` would execute `a` and `a.b`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from megacpp_overlays.errors import OverlayError, SourceError
from megacpp_overlays.frozen import NamedTuple

if TYPE_CHECKING:
    from megacpp_overlays.source.bindings import Bindings

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class ModuleSource:
    """The text of one module, with the few questions that probes ask of it."""

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
            SourceError: this interpreter cannot parse the text.
        """
        try:
            return ast.parse(self.text, filename=self.path)
        except SyntaxError as error:
            raise SourceError(f"{self.path}:{error.lineno}: cannot be parsed: {error.msg}") from error

    @functools.cached_property
    def bindings(self) -> Bindings:
        """What binds the names of the module.

        Raises:
            SourceError: see `syntax`.
        """
        from megacpp_overlays.source.bindings import Bindings  # noqa: PLC0415 - not needed to arm

        return Bindings(self.syntax)

    def find(self, symbol: str) -> ast.ClassDef | FunctionNode | None:
        """Return the one definition of a qualified name such as `Layer.forward`.

        Returns:
            None when there is none.

        Raises:
            SourceError: the name is defined or bound more than once, so the text alone cannot say what is live.
        """
        found: ast.ClassDef | FunctionNode | None = None
        parts = symbol.split(".")
        for depth in range(1, len(parts) + 1):
            matches = self.bindings.definitions(".".join(parts[:depth]))
            if len(matches) > 1:
                raise SourceError(f"{self.path}: {symbol} is defined {len(matches)} times")
            if not matches:
                return None
            found = matches[0]
            others = [node for node in self.bindings.of(".".join(parts[:depth])) if node is not found]
            if others:
                line = getattr(others[0], "lineno", None)
                raise SourceError(f"{self.path}:{line}: {symbol} is bound elsewhere, too")
        return found

    def function(self, symbol: str) -> FunctionNode | None:
        """Return the definition of a function or method, or None when the name is no function here."""
        node = self.find(symbol)
        return node if isinstance(node, FunctionNode) else None


def parameters(function: FunctionNode) -> tuple[str, ...]:
    """Return the parameter names of a function in order, `*` and `**` marked as such."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [arg.arg for arg in args.kwonlyargs]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return tuple(names)


class ShippedFile(NamedTuple):
    """The text of a file that a package ships beside its modules, such as the C++ that it was built from."""

    path: str
    text: str


class SourceTree(Protocol):
    """Anything that can hand out module sources by dotted name."""

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of a module, or None when there is no such module here.

        Raises:
            SourceError: the module is there, but its text cannot be read.
        """


@runtime_checkable
class ShippingTree(SourceTree, Protocol):
    """A tree that also hands out files which are no modules."""

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file by its path in the folder of a package, or None when it or the package is not here.

        Raises:
            SourceError: the file is there, but it cannot be read.
        """


def shipped(tree: SourceTree, package: str, path: str) -> ShippedFile | None:
    """Return a file that a package ships, by its path in the folder of the package; None when there is none.

    Raises:
        SourceError: the file cannot be read, or this tree knows modules only.
    """
    if not isinstance(tree, ShippingTree):
        raise SourceError(f"{package}/{path}: {type(tree).__name__} hands out modules only")
    return tree.shipped(package, path)


class InstalledTree:
    """The packages of this interpreter. A loaded module answers with the file that it was loaded from."""

    def module(self, name: str) -> ModuleSource | None:
        """Return the source of an importable module; imports nothing."""
        loaded = sys.modules.get(name)
        if isinstance(file := getattr(loaded, "__file__", None), str):
            return _read_python(name, Path(file))
        *parents, last = name.split(".")
        if not parents:
            spec = find_spec(name, None, None)
            return _read_python(name, Path(spec.origin)) if spec and spec.origin and spec.has_location else None
        for folder in _search_path(parents):
            if (path := _module_file(Path(folder), [last])) is not None:
                return _read_python(name, path)
        return None

    def shipped(self, package: str, path: str) -> ShippedFile | None:
        """Return a file in the folder of an importable package; imports nothing."""
        for folder in _search_path(package.split(".")):
            if (found := _read_text(Path(folder, path))) is not None:
                return found
        return None


def _search_path(parents: list[str]) -> list[str]:
    """Return the folders in which modules of a package are looked for, and import nothing on the way.

    Editable installs and `pkgutil.extend_path` decide that level by level, so each level is asked.
    """
    folders = list(sys.path)
    for depth in range(1, len(parents) + 1):
        name = ".".join(parents[:depth])
        loaded = sys.modules.get(name)
        if loaded is not None and hasattr(loaded, "__path__"):
            folders = list(loaded.__path__)
            continue
        try:
            spec = find_spec(name, folders if depth > 1 else None, None)
            folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        except (ImportError, KeyError):  # KeyError: a namespace package asks for its parent, which is not imported
            folders = [str(Path(folder, parents[depth - 1])) for folder in folders]
    return folders


def find_spec(
    name: str, path: Sequence[str] | None, target: ModuleType | None, *, but: object = None
) -> ModuleSpec | None:
    """Ask the finders of the import system for a module, and none of its parents be imported for it."""
    parent = name.rpartition(".")[0]
    for finder in sys.meta_path:
        if type(finder).__module__.partition(".")[0] == "wrapt" and parent and parent not in sys.modules:
            continue  # its hooks would import the parents of a watched module, which no import system asks it to do
        ask = getattr(finder, "find_spec", None)  # the import system, too, passes by a finder without it
        if finder is not but and ask is not None and (spec := ask(name, path, target)) is not None:
            return cast("ModuleSpec", spec)
    return None


def readable(tree: SourceTree, name: str) -> ModuleSource | None:
    """Return the source of a module, or None when it is missing or cannot be read."""
    try:
        return tree.module(name)
    except OverlayError:
        return None


class Remembered:
    """A tree that reads each file and parses each module once; for decisions that are taken together."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._found: dict[str, ModuleSource | None] = {}
        self._shipped: dict[tuple[str, str], ShippedFile | None] = {}

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


def _module_file(folder: Path, parts: list[str]) -> Path | None:
    stem = folder.joinpath(*parts)
    for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
        if path.is_file():
            return path
    return None


def _read_text(path: Path) -> ShippedFile | None:
    try:
        return ShippedFile(str(path), path.read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error


def _read_python(name: str, path: Path) -> ModuleSource:
    if path.suffix != ".py":
        raise SourceError(f"{name} is loaded from {path}, which has no Python source")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{name}: cannot read {path}: {error.strerror}") from error
    return ModuleSource(name, str(path), decoded(str(path), raw))


def decoded(path: str, raw: bytes) -> str:
    """Return the text of a Python file, as its first lines say that it is encoded.

    Raises:
        SourceError: it is not encoded so.
    """
    try:
        return importlib.util.decode_source(raw)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be decoded: {error}") from error
