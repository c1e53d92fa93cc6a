"""The files of a new overlay, generated from templates and the installed source of its target."""

from __future__ import annotations

import ast
import copy
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import importlib_metadata

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.source import distributions
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import ModuleSource, SourceTree

_HERE = Path(__file__).parent
_FIRST_OF_PLUGINS = 90
"""Number of the first pack of a plugin, far from those of this project; a number has two digits."""
_COMMON = ("reproduce.py", "neighbours.py", "pack.toml", "README.md")
_FROM_MODEL = "from megacpp_overlays.model import Observation, Overlay, Replacement"
_REPOSITORY = re.compile(r"github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?(?:[/#?]|$)")


class NewOverlay(NamedTuple):
    """The description of a new overlay."""

    id: str
    module: str
    symbol: str
    distribution: str
    date: str

    @property
    def name(self) -> str:
        """The name of its module."""
        return self.id.replace("-", "_")


def target_of(text: str) -> tuple[str, str]:
    """Return module and symbol of `MODULE:SYMBOL`.

    Raises:
        UpkeepError: the text has another form.
    """
    module, sign, symbol = text.partition(":")
    if not sign or not all(part.isidentifier() for part in [*module.split("."), *symbol.split(".")]):
        raise UpkeepError(
            f"{text}: MODULE:FUNCTION or MODULE:CLASS.METHOD is wanted, such as megatron.core.utils:divide"
        )
    return module, symbol


def distribution_of(module: str) -> str:
    """Return the distribution that a module is installed from, or a name made from its outermost package where none is known."""
    top = module.partition(".")[0]
    names = importlib_metadata.packages_distributions().get(top, [])
    return next(iter(dict.fromkeys(names)), top.replace("_", "-"))


def in_project(new: NewOverlay, tree: SourceTree, root: Path) -> dict[Path, str]:
    """Return the files of an overlay of this project, by path.

    Raises:
        UpkeepError: the target cannot be read, or a file is there already.
    """
    pack = 1 + max((int(folder.name[:2]) for folder in (root / "packs").glob("[0-9][0-9]-*")), default=0)
    fields = _fields(new, tree, pack) | {
        "imports": f"from megacpp_overlays.feature_probes import {new.name} as feature\n{_FROM_MODEL}",
        "packs_option": "",
    }
    folder = root / "packs" / f"{pack:02}-{new.id}"
    return _filled(
        {
            root / "overlays" / f"{new.name}.py": "overlay.py",
            root / "feature_probes" / f"{new.name}.py": "probe.py",
            root / "tests" / "overlays" / f"test_{new.name}.py": "test_in_project.py",
            **{folder / name: name for name in _COMMON},
        },
        fields,
    )


def as_plugin(new: NewOverlay, tree: SourceTree, folder: Path) -> dict[Path, str]:
    """Return the files of an overlay in a user's own package, by path.

    The package is created if it does not exist; an existing `pyproject.toml` is not changed.

    Raises:
        UpkeepError: the target cannot be read, or a file is there already.
    """
    project = folder.resolve().name
    package = re.sub(r"\W", "_", project)
    if not package.isidentifier():
        raise UpkeepError(f"--plugin {folder}: its name is to be that of a package, such as our-fixes")
    packs = folder / "packs"
    pack = 1 + max((int(each.name.partition("-")[0]) for each in packs.glob("[0-9]*-*")), default=_FIRST_OF_PLUGINS - 1)
    fields = _fields(new, tree, pack) | {
        "imports": f"{_FROM_MODEL}\n\nfrom {package} import {new.name}_probe as feature",
        "packs_option": " --packs packs",
        "package": package,
        "project": project,
    }
    files = {
        folder / package / f"{new.name}.py": "overlay.py",
        folder / package / f"{new.name}_probe.py": "probe.py",
        folder / "tests" / f"test_{new.name}.py": "test_of_plugin.py",
        **{packs / f"{pack:02}-{new.id}" / name: name for name in _COMMON},
    }
    if not (folder / "pyproject.toml").exists():
        files[folder / "pyproject.toml"] = "pyproject.toml"
    found = _filled(files, fields)
    if not (folder / package / "__init__.py").exists():
        found[folder / package / "__init__.py"] = ""
    return found


def _fields(new: NewOverlay, tree: SourceTree, pack: int) -> dict[str, str]:
    source = tree.module(new.module)
    if source is None:
        raise UpkeepError(
            f"{new.module} is not installed here: install its package, or say where it is with --tree FOLDER"
        )
    return {
        "id": new.id,
        "name": new.name,
        "pack": f"{pack:02}",
        "module": new.module,
        "symbol": new.symbol,
        "function": new.symbol.rpartition(".")[2],
        "distribution": new.distribution,
        "version": distributions.version(new.distribution) or "an unknown version",
        "date": new.date,
        "repository": _repository(new.distribution),
        "file": _file(new.module, source),
        "code": pattern_of(source, new.symbol),
    }


def _file(module: str, source: ModuleSource) -> str:
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if Path(source.path).name == "__init__.py" else f"{path}.py"


def _repository(distribution: str) -> str:
    """Return the GitHub repository in the metadata of a distribution, or the placeholder OWNER/NAME."""
    try:
        metadata = importlib_metadata.metadata(distribution)
    except importlib_metadata.PackageNotFoundError:
        return "OWNER/NAME"
    urls = [*(metadata.get_all("Project-URL") or []), str(metadata.get("Home-page") or "")]
    return next((found[1] for url in urls if (found := _REPOSITORY.search(url))), "OWNER/NAME")


def pattern_of(source: ModuleSource, symbol: str) -> str:
    """Return the code of a function as a pattern that matches it, without its docstring and annotations, which patterns ignore.

    Raises:
        UpkeepError: there is no such function, or its code cannot be written as a pattern.
    """
    function = source.function(symbol)
    if not isinstance(function, ast.FunctionDef):
        raise UpkeepError(f"{source.name} has no function {symbol}, which is the kind that a seam replaces")
    plain = copy.deepcopy(function)
    if ast.get_docstring(plain) is not None and len(plain.body) > 1:
        plain.body = plain.body[1:]
    plain.returns = None
    for argument in ast.walk(plain.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    text = ast.unparse(plain)
    if "$" in text or '"""' in text or not Pattern(text).match(function):
        raise UpkeepError(
            f"{source.name}.{symbol} cannot be written as a pattern word for word: write its probe by hand"
        )
    return text


def _filled(files: Mapping[Path, str], fields: Mapping[str, str]) -> dict[Path, str]:
    if there := [str(path) for path in files if path.exists()]:
        raise UpkeepError(f"{there[0]} is there already: choose another id, or remove it")
    return {
        path: string.Template((_HERE / f"{name}.txt").read_text()).substitute(fields) for path, name in files.items()
    }
