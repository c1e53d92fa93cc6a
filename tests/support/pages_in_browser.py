"""Pages as tests read them: their text, and in a headless Chromium."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from playwright.sync_api import sync_playwright


class Reader(HTMLParser):
    """The links, loaded files and ids of a page, its headings in order, and the rows of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        """Addresses, and `script` for one that is inline."""
        self.levels: list[int] = []
        self.tables: list[list[list[str]]] = []
        self.scopes: list[str | None] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids += [values["id"]] if values.get("id") else []
        self.levels += [int(tag[1])] if tag in {"h1", "h2", "h3"} else []
        if tag == "a":
            self.links.append(str(values["href"]))
        elif {"src", "href"} & values.keys() or tag == "script":
            self.loads.append(values.get("src") or values.get("href") or tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"th", "td"}:
            self._cell = True
            self.tables[-1][-1].append("")
            if tag == "th":
                self.scopes.append(values.get("scope"))

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in {"th", "td"}

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.tables[-1][-1][-1] += data


def chromium() -> Iterator[Any]:
    """Start a browser: of this machine, or the one that `scripts/browser.sh --fetch` brings; without any, skip."""
    done = subprocess.run([ROOT / "scripts" / "browser.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("no chromium here: install one, or run scripts/browser.sh --fetch")
    with sync_playwright() as started:
        launched = started.chromium.launch(executable_path=done.stdout.strip(), args=["--no-sandbox"])
        yield launched
        launched.close()


def opener(browser: Any, page: Path) -> Iterator[Callable[..., Any]]:
    """Open a page; nothing but the file itself may be asked for, and the console stays empty."""
    contexts: list[Any] = []
    asked: list[str] = []
    said: list[str] = []

    def load(*, width: int = 1280, height: int = 900, scheme: str = "light", at: str = "") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        tab = contexts[-1].new_page()
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(page.as_uri() + at)
        return tab

    yield load
    for context in contexts:
        context.close()
    assert {url.partition("#")[0] for url in asked} == {page.as_uri()}
    assert said == []


def unfold(tab: Any) -> None:
    """Open all that is folded in."""
    tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")


def check_nothing_is_cut(tab: Any, width: int) -> None:
    """Check that nothing of a page is beyond its right edge."""
    unfold(tab)
    wide = tab.evaluate("""() => [...document.querySelectorAll("body *")].filter(each =>
        !each.closest(".skip") && each.getBoundingClientRect().right > innerWidth + 0.5
    ).map(each => each.outerHTML.slice(0, 80))""")

    assert wide == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width


def check_accessible(tab: Any) -> None:
    """Check that axe finds nothing."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    unfold(tab)

    found = axe.Axe().run(tab)

    assert found.violations_count == 0, found.generate_report()
