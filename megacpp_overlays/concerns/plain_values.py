"""Values of configurations as text: `2`, `None`, `true` and `['a', 'b']` are what they look like, everything else is text."""

from __future__ import annotations

import ast

_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}
_KEPT = {"none"}
"""In lower case a word of Megatron's own, as in `--cuda-graph-impl none`."""


def plain_value(text: str) -> object:
    """Return the value that a text stands for."""
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
