"""A made-up upstream package, broken in a known way, with the overlay that repairs it."""

from __future__ import annotations

import ast
import importlib
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megacpp_overlays.model import (
    Body,
    Evidence,
    Finding,
    Gate,
    Observation,
    Overlay,
    Proof,
    Replacement,
    Target,
    Text,
    Verdict,
)
from megacpp_overlays.source.trees import SourceTree, shipped

BROKEN_TEXT = '''
"""A made-up upstream whose `double` is off by one."""

CALLS = []


def double(x):
    return x + x + 1


class Layer:
    def __init__(self):
        self.built = True

    def forward(self, x):
        return double(x) + 1

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def build(cls, x):
        return cls.__name__, x + 1

    @property
    def size(self):
        return 1


class Child(Layer):
    pass
'''
LOOKS_REPAIRED_TEXT = BROKEN_TEXT.replace("return x + x + 1", "return twice(x)").replace(
    "CALLS = []", "from .helpers import twice\n\nCALLS = []"
)
"""`double` depends on its helper, which the probe does not read."""
FIXED_TEXT = BROKEN_TEXT.replace("return x + x + 1", "return x + x")


@dataclass
class Upstream:
    """A throw-away package on the path, with the overlay that repairs it."""

    name: str
    folder: Path

    @property
    def module_name(self) -> str:
        return f"{self.name}.layers"

    def write(self, text: str, module: str = "layers") -> None:
        package = self.folder / self.name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / f"{module}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    def load(self, module: str = "layers") -> ModuleType:
        return importlib.import_module(f"{self.name}.{module}")

    def probe(self, tree: SourceTree) -> Finding:
        """BROKEN when `double` adds one, FIXED when it does not; it looks repaired when another function is called."""
        source = tree.module(self.module_name)
        function = source.function("double") if source else None
        if source is None or function is None:
            return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence(seen="no double"),))
        body = ast.unparse(function.body[-1])
        seen = (Evidence(seen=body, file=source.path, line=function.lineno),)
        known = {"return x + x + 1": Verdict.BROKEN, "return x + x": Verdict.FIXED}
        verdict = known.get(body, Verdict.UNRECOGNISED)
        if verdict is Verdict.FIXED:
            repair = (Body(self.module_name, "double"),)
            return Finding(verdict=verdict, shape=None, evidence=seen, repair=repair, proof=Proof.READ)
        if body == "return twice(x)":
            repair = (Body(self.module_name, "double"),)
            return Finding(verdict=verdict, shape=None, evidence=seen, repair=repair, looks_repaired=True)
        return Finding(verdict=verdict, shape="off-by-one" if verdict is Verdict.BROKEN else None, evidence=seen)

    def overlay(self, **changes: object) -> Overlay:
        fields = {
            "id": "double-fix",
            "pack": 99,
            "title": "Doubles without adding one.",
            "target": Target(distribution=self.name, module=self.module_name, symbol="double"),
            "probe": self.probe,
            "replacements": {
                "off-by-one": (Replacement(symbol="double", make=lambda original, _: lambda x: original(x) - 1),)
            },
            "unsupported": {},
            "witness": lambda module: Observation(broken=module.double(1) != 2, seen=f"double(1) = {module.double(1)}"),
            "self_test": lambda module: Observation(
                broken=module.double(1) != 2, seen=f"double(1) = {module.double(1)}"
            ),
            "opt_in": False,
            "breaks": "every double is one too large",
            "retire_when": "upstream doubles without adding one",
            "threads": (),
            "last_validated": "never: it is made up",
        }
        return Overlay(**{**fields, **changes})  # type: ignore[arg-type]


def gate_of(upstream: Upstream, **changes: Any) -> Gate:
    """Return a gate about the made-up upstream: its notes say whether the combination works."""

    def probe(tree: SourceTree) -> Finding:
        notes = shipped(tree, upstream.name, "notes.txt")
        if notes is None:
            return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence(seen="there are no notes"),))
        verdict, shape = {
            "does not work": (Verdict.BROKEN, "no-work"),
            "works": (Verdict.FIXED, None),
            "does nothing": (Verdict.BROKEN, "nobody-knows-why"),
        }.get(notes.text, (Verdict.UNRECOGNISED, None))
        seen = (Evidence(seen=notes.text, file=notes.path, line=1),)
        if verdict is Verdict.FIXED:
            repair = (Text(notes.path, notes.text),)
            return Finding(verdict=verdict, shape=None, evidence=seen, repair=repair, proof=Proof.READ)
        return Finding(verdict=verdict, shape=shape, evidence=seen)

    fields = {
        "id": "double-trouble",
        "pack": 98,
        "title": "Doubles beside halves are installed.",
        "target": Target(distribution=upstream.name, module=upstream.module_name, symbol="double"),
        "beside": ("pytest",),
        "probe": probe,
        "unsupported": {"no-work": "install fewer doubles"},
        "breaks": "the first double hangs",
        "retire_when": "doubles and halves work together",
        "threads": (),
        "last_validated": "never: it is made up",
    }
    return Gate(**{**fields, **changes})


def install_plugin(folder: Path, declaration: str, name: str = "double") -> None:
    """Write the metadata by which a declaration, such as `plugin:OVERLAY`, is an installed plugin of this name."""
    info = folder / "made_up_plugin-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[megacpp_overlays.overlays]\n{name} = {declaration}\n")
