"""The templates of all pages, which share one style."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jinja2

_INVISIBLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""Control characters but line ends and tabs, marks that turn the direction of text, and halves of characters."""


@functools.cache
def named(name: str, folder: Path) -> jinja2.Template:
    """Return a template of a folder; whatever is put into it is text, all of which can be seen, and never markup."""
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
    """Return a text with escapes in the place of characters that a page may not have or that would forge what it shows.

    Markup is what a template made, of parts that came by here.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), value)
