"""Parser of untrusted JSON: a text is parsed, or refused with a ValueError, at any depth of nesting.

The parser of the standard library raises RecursionError for a text that is nested too deeply, and so would any code that
walks through such data afterwards.
"""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""Levels. The audits, manifests and answers that this package reads have less than ten."""


def parse(text: str | bytes) -> Any:
    """Return the data of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested more than `DEEPEST` levels deep.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level = [data]
    for _ in range(DEEPEST + 1):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return data
    raise _too_deep()


def _within(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, list) else []


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {DEEPEST} levels deep")
