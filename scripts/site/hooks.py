"""Build hooks of the documentation site: tables that fit a phone, landmarks, and a search index that opens as a file.

`properdocs.yml` names this file under `hooks`. The rest of the site's own theme is in the same folder: `css/site.css` and
`search/main.js`, which takes the place of the search of the theme.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown  # type: ignore[import-untyped]
from markdown.treeprocessors import Treeprocessor  # type: ignore[import-untyped]

INDEX = "search/search_index.json"
"""The index that the plugin `search` writes."""
PAGES = "search/pages.js"
"""The same as a script: a page that is opened as a file may load a script and may not ask for JSON."""
MANY_COLUMNS = 5
MANY = {"class": "many-columns", "tabindex": "0", "role": "region"}
NAVBAR = '<div class="navbar '


class TablesForAllScreens(Treeprocessor):  # type: ignore[misc]  # Markdown has no types
    """Make tables readable on a phone and to a screen reader.

    Each cell gets the heading of its column, which a phone shows before the cell. A heading without text is no heading, and a
    table of many columns is put into a region that can be scrolled with the keyboard.
    """

    def run(self, root: Element) -> None:
        """Change all tables of a page."""
        places = [(parent, each) for parent in root.iter() for each in parent if each.tag == "table"]
        for number, (parent, table) in enumerate(places, start=1):
            headings = _headings(table)
            if len(headings) >= MANY_COLUMNS:
                region = Element("div", MANY | {"aria-label": f"Table {number}, by {headings[0] or 'row'}"})
                region.append(table)
                parent[list(parent).index(table)] = region


def _headings(table: Element) -> list[str]:
    """Set `data-heading` on the cells of a table; return the headings."""
    cells = list(table.iter("th"))
    headings = ["".join(each.itertext()).strip() for each in cells]
    for cell, heading in zip(cells, headings, strict=True):
        if not heading:
            cell.tag = "td"
    head = table.find("thead")
    if head is not None and not any(headings):
        table.remove(head)
    for row in table.iter("tr"):
        for heading, cell in zip(headings, row.findall("td"), strict=False):
            if heading:
                cell.set("data-heading", heading)
    return headings


class TableHeadings(Extension):  # type: ignore[misc]
    """The Markdown extension of `TablesForAllScreens`."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register after inline markup has become elements."""
        md.treeprocessors.register(TablesForAllScreens(md), "tables_for_all_screens", 3)


def on_config(config: Any) -> Any:
    """Add the Markdown extension."""
    config.markdown_extensions.append(TableHeadings())
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Make the bar at the top a landmark.

    Raises:
        ValueError: the theme has no such bar, or two.
    """
    if output.count(NAVBAR) != 1:
        raise ValueError(
            f"a page of the theme has {output.count(NAVBAR)} elements `{NAVBAR}`; mend scripts/site/hooks.py"
        )
    return output.replace(NAVBAR, NAVBAR.replace("<div", '<div role="navigation" aria-label="Site"'))


def on_post_build(config: Any) -> None:
    """Write the search index as a script. Hooks run after plugins, so the index is there."""
    site = Path(config.site_dir)
    docs = json.loads((site / INDEX).read_text())["docs"]
    with_sections = {page for page, mark, _ in (each["location"].partition("#") for each in docs) if mark}
    docs = [  # the text of a page is that of its sections once more
        {**each, "title": html.unescape(each["title"])} for each in docs if each["location"] not in with_sections
    ]
    text = json.dumps(docs, ensure_ascii=True, separators=(",", ":")).replace("</", "<\\/")
    (site / PAGES).write_text(f"const SEARCHED_PAGES = {text};\n")
