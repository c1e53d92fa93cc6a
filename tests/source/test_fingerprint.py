"""Fingerprints of code: they change with its meaning, and with nothing else."""

from __future__ import annotations

import ast

import pytest
from dsa_source import statement_edits

from megacpp_overlays.source.fingerprint import fingerprint

TEXT = '''
@decorated
def scale(x, factor=2, *, out=None):
    """Scale it."""
    if x is None:
        return out
    return x * factor
'''


def fingerprint_of(text: str) -> str:
    return fingerprint(ast.parse(text).body)


@pytest.mark.parametrize(
    "edited",
    [
        TEXT.replace("Scale it.", "Something else."),
        TEXT.replace('    """Scale it."""\n', ""),
        TEXT.replace("x * factor", "x * factor  # the product"),
        TEXT.replace("x * factor", "(\n        x * factor\n    )"),
        "\n\n" + TEXT,
    ],
    ids=["docstring", "no docstring", "comment", "layout", "position"],
)
def test_docstrings_comments_layout_and_position_do_not_count(edited: str) -> None:
    assert edited != TEXT
    assert fingerprint_of(edited) == fingerprint_of(TEXT)


@pytest.mark.parametrize("text", ['"""Other words."""\n    ', ""], ids=["other words", "no words"])
def test_the_words_of_a_class_and_of_its_methods_do_not_count(text: str) -> None:
    template = 'class Layer:\n    {}size = 1\n\n    def scale(self):\n        """Scale it."""\n        return 2\n'

    assert fingerprint_of(template.format(text)) == fingerprint_of(template.format('"""Scales."""\n    '))


@pytest.mark.parametrize(
    "edited",
    [
        TEXT.replace("@decorated\n", ""),
        TEXT.replace("factor=2", "factor=3"),
        TEXT.replace("*, out", "out"),
        TEXT.replace("is None", "is not None"),
        TEXT.replace("x * factor", "factor * x"),
        TEXT.replace("return out", "pass"),
        TEXT + "scale = other\n",
        TEXT.replace("2", "2.0"),
    ],
    ids=["decorator", "default", "kind", "condition", "order", "statement", "more", "type of a number"],
)
def test_every_edit_of_meaning_counts(edited: str) -> None:
    assert fingerprint_of(edited) != fingerprint_of(TEXT)


NESTED = """
def scale(x, factor):
    total = x
    for part in range(factor):
        if part:
            total = total + x
        else:
            continue
    with locked():
        note(total)
    return total
"""


def test_no_statement_may_be_missing_or_doubled() -> None:
    edits = list(statement_edits(NESTED, "scale"))

    assert len(edits) == 2 * 8
    for edit, edited in edits:
        assert fingerprint_of(edited) != fingerprint_of(NESTED), edit


def test_a_string_that_is_no_docstring_counts() -> None:
    assert fingerprint_of("x = 1\n'text'\n") != fingerprint_of("x = 1\n'other'\n")


def test_a_missing_definition_has_a_fingerprint_of_its_own() -> None:
    assert fingerprint(None) != fingerprint_of(TEXT)
