"""Parser of configuration values in text: `2`, `None`, `true` and `['a', 'b']` are parsed, any other text stays text."""

from __future__ import annotations

import ast

_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}
_KEPT = {"none"}
"""Words that stay text in lower case, since Megatron has them as values, as in `--cuda-graph-impl none`."""


def plain_value(text: str) -> object:
    """Return the value that a text denotes."""
    text = text.strip()
    if text in _KEPT:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | str | list | tuple) else text
