"""The reference page of the settings, rendered from their registry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megacpp_overlays.model import Erratum
from megacpp_overlays.variables import SETTINGS, SWITCH, Setting

_HEAD = """\
All settings are environment variables. They are read and checked once, when `megacpp_overlays` is imported: a misspelt
name or a value that is not known is a `SettingsError` there, with the nearest right one. An empty value counts as not set,
and spaces around a value and the case of a word do not count.
"""


def settings_page(overlays: Iterable[Erratum], note: str = "") -> str:
    """Return the page as Markdown.

    Args:
        overlays: the overlays whose switches are listed.
        note: a paragraph below the title, such as one that names the command that generates the page.
    """
    ids = {overlay.id: overlay for overlay in overlays}
    parts = ["# Settings\n", note and f"{note}\n", _HEAD, _overview(SETTINGS)]
    for setting in SETTINGS:
        parts.append(_section(setting))
        if setting is SWITCH:
            parts.append(_switches(ids.values()))
    return "\n".join(part for part in parts if part)


def _overview(settings: Sequence[Setting]) -> str:
    rows = [[f"[`{each.name}`](#{_anchor(each)})", _values(each), _default(each)] for each in settings]
    return _table(["variable", "values", "default"], rows)


def _section(setting: Setting) -> str:
    lines = [
        f"## `{setting.name}`",
        "",
        setting.meaning,
        "",
        f"- Values: {_values(setting)}",
        f"- Default: {_default(setting)}",
        f"- Ranks: {setting.ranks}",
    ]
    return "\n".join(lines) + "\n"


def _switches(overlays: Iterable[Erratum]) -> str:
    rows = [[f"`{each.variable}`", "off" if each.off_by_default else "on", each.title] for each in overlays]
    return _table(["variable", "without it", "what the overlay does"], rows)


def _anchor(setting: Setting) -> str:
    """Return the anchor that Markdown renderers create from the title of a setting's section."""
    return re.sub(r"\W", "", setting.name.lower())


def _values(setting: Setting) -> str:
    words = [f"`{value}`" for value in setting.values]
    return ", ".join([*words, setting.form] if setting.form else words)


def _default(setting: Setting) -> str:
    return f"`{setting.default}`" if setting.default else "not set"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)
