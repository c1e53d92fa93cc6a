"""JSON texts of others: parsed, or refused with a ValueError, however they are nested."""

from __future__ import annotations

import json
import sys

import pytest

from megacpp_overlays import json_text


@pytest.mark.parametrize("data", [None, 1, "a", [], {}, {"a": [1, {"b": None}]}, [[]] * 3])
def test_data_are_parsed(data: object) -> None:
    assert json_text.parse(json.dumps(data)) == data
    assert json_text.parse(json.dumps(data).encode()) == data


@pytest.mark.parametrize("text", ["", "{", "1 2", b"\xff\xfe\xfd"])
def test_a_text_that_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        json_text.parse(text)


@pytest.mark.parametrize("around", ["[{}]", '{{"a": {}}}', '[{{"a": {}}}]'], ids=["lists", "tables", "both"])
def test_a_text_is_parsed_up_to_a_depth(around: str) -> None:
    text = "1"
    for _ in range(json_text.DEEPEST // (2 if around.startswith("[{{") else 1)):
        text = around.format(text)
    assert json_text.parse(text)

    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        json_text.parse(f"[{text}]")


@pytest.mark.parametrize("levels", [sys.getrecursionlimit(), 100_000, 1_000_000])
def test_no_depth_ends_in_a_recursion_error(levels: int) -> None:
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        json_text.parse("[" * levels + "]" * levels)
    for text in ("[" * levels, '{"a":' * levels):
        with pytest.raises(ValueError, match=r"nested more than|Expecting value"):
            json_text.parse(text)
