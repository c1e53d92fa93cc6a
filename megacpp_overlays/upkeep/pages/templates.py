"""The templates of all pages, which share one style."""

from __future__ import annotations

from pathlib import Path

import jinja2


def named(name: str, folder: Path) -> jinja2.Template:
    """Return a template of a folder; whatever is put into it is text and never markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)
