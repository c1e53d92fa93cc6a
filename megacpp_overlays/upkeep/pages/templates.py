"""The templates of all pages, which share one style."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jinja2

_INVISIBLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""Control characters except line ends and tabs, marks that change the direction of text, and surrogates."""


@functools.cache
def named(name: str, folder: Path) -> jinja2.Template:
    """Return a template of a folder, which escapes markup and invisible characters in every inserted value."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def _visible(value: Any) -> Any:
    """Return a text with escapes in the place of characters that are forbidden in a page or would forge its visible text.

    Markup is returned as it is: a template made it from values that this function already escaped.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), value)
