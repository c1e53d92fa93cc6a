"""A headless Chromium for tests of pages."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from playwright.sync_api import sync_playwright


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
    """Check that nothing of a page stands beyond its right edge."""
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
