"""Names and words of the package and its tests."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
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


PACKAGE = ("megacpp_overlays", "overlays", "feature_probes")
CODE = (*PACKAGE, "tests", "proof", "benchmarks", "scripts", "examples")
KEPT = ("packs/", "proof/on_cpu/sitecustomize.py")
"""Modules whose text is part of the key of receipts: they follow with their next edit."""
NOUNS = {"Blocked", "Finding", "Masked", "Need", "Reading", "Ring", "Ruling", "Setting"}
"""Last words of class names that end as a participle does; `Blocked` and `Masked` are public."""
UNCLEAR = ("what", "whoever", "nobody", "somebody", "told", "beside", "stands")
"""Words for which English of the field has a noun or a verb of its own."""
MOST_IN_PACKAGE, MOST_IN_TESTS = 150, 170
"""Most occurrences of these words: in names, in recorded texts, and where there is no better word."""


def modules(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_a_module_is_named_by_a_noun_or_a_verb() -> None:
    """The first word of a docstring says what a module holds, and is no question."""
    asked, read = [], 0
    for path in modules(*CODE):
        name = path.relative_to(ROOT).as_posix()
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").split(maxsplit=1)
        read += bool(first)
        if first and first[0] in {"What", "Whether", "Which", "How", "Who", "Where"} and not name.startswith(KEPT):
            asked.append(name)

    assert asked == []
    assert read > 1000


def test_a_class_of_the_package_is_named_by_a_noun() -> None:
    """`KeptLogits` is one, and `Kept` is a participle: a name has to say of what."""
    found = set()
    for path in modules(*PACKAGE):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                last = re.findall(r"[A-Z][a-z]*", node.name)[-1]
                found |= {node.name} if last.endswith(("ed", "ing")) and last not in NOUNS else set()

    assert found == set()


@pytest.mark.parametrize(("folders", "most"), [(PACKAGE, MOST_IN_PACKAGE), (("tests",), MOST_IN_TESTS)])
def test_texts_name_things_by_nouns(folders: tuple[str, ...], most: int) -> None:
    """Docstrings, comments and messages: `the installed source` is clearer than `what is installed`."""
    words = re.compile(rf"\b(?:{'|'.join(UNCLEAR)})\b", re.IGNORECASE)
    counts = Counter({path: len(words.findall(path.read_text())) for path in modules(*folders)})

    assert counts.total() <= most, counts.most_common(5)
    assert len(counts) > 50


def test_tests_are_named_without_these_words() -> None:
    """The name of a test says its subject by a noun. Names of GPU tests are kept: they seed the random numbers of measured limits."""
    named = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in modules("tests")
        if ROOT / "tests" / "gpu" not in path.parents
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    ]

    unclear = {*UNCLEAR, "whatever"}
    assert [(file, name) for file, name in named if unclear.intersection(name.split("_"))] == []
    assert len(named) > 3000
