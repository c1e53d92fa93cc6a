"""Names of the package: each class has one of its own."""

from __future__ import annotations

import ast
from collections import defaultdict

from places import ROOT


def test_no_two_classes_have_one_name() -> None:
    """A name in a traceback, a review or a search then leads to one place."""
    places = defaultdict(list)
    for folder in ("megacpp_overlays", "overlays", "feature_probes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    assert len(places) > 100


KEPT = ("packs/", "megacpp_overlays/kernels/", "megacpp_overlays/runtime/__init__.py", "proof/on_cpu/sitecustomize.py")
"""Modules whose text is part of the key of receipts, or of answers that take minutes: they follow with their next edit."""
CODE = ("megacpp_overlays", "overlays", "feature_probes", "tests", "proof", "benchmarks", "scripts", "examples")


def test_a_module_is_named_by_a_noun_or_a_verb() -> None:
    """The first word of a docstring names the content of the module; a question word names a question instead."""
    asked, read = [], 0
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").split(maxsplit=1)
            read += bool(first)
            if first and first[0] in {"What", "Whether", "Which", "How", "Who", "Where"} and not name.startswith(KEPT):
                asked.append(name)

    assert asked == []
    assert read > 1000
