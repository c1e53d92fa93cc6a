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
