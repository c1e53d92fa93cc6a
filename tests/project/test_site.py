"""The documentation site, in a browser and opened as files: it fits a phone, is accessible, and its search finds."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages_in_browser import check_accessible, chromium
from places import HANG_S, ROOT

BUILT = ROOT / ".cache/site/html"
QUICK = ("index.html", "docs/overlays.html", "docs/operating.html", "proof/results/other-patches.html")
"""Pages with the widest tables and the longest lines of code that people read."""
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def site() -> Path:
    """The site as `make docs` builds it; `make test` has built it before."""
    if not (BUILT / "search/pages.js").exists():
        done = subprocess.run(
            [ROOT / "scripts/site.sh", ROOT / ".venv/bin/properdocs"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return BUILT


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from chromium()


@pytest.fixture
def open_page(browser: Any, site: Path) -> Iterator[Open]:
    """Open a page as a file; nothing but files of the site may be asked for, and a script may not fail."""
    contexts: list[Any] = []
    asked: list[str] = []
    said: list[str] = []

    def load(name: str, *, width: int = 1280, scheme: str = "light", query: str = "") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        contexts[-1].set_default_timeout(1000 * HANG_S)
        tab = contexts[-1].new_page()
        tab.on("request", lambda request: asked.append(request.url))
        # The theme's own scripts fail on some pages: it takes ids that begin with a digit for selectors, for one.
        tab.on("pageerror", lambda error: said.extend([] if "/js/" in (error.stack or "") else [str(error)]))
        tab.goto((site / name).as_uri() + query)
        return tab

    yield load
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith((site.as_uri(), "data:"))] == []
    assert said == []


def scrolls_sideways(open_page: Open, names: list[str], widths: list[int]) -> list[tuple[str, int]]:
    tab = open_page(names[0])
    found = []
    for name in names:
        tab.goto((BUILT / name).as_uri())
        for width in widths:
            tab.set_viewport_size({"width": width, "height": 900})
            if tab.evaluate("document.documentElement.scrollWidth") > width:
                found.append((name, width))
    return found


def test_no_page_that_people_read_scrolls_sideways(open_page: Open) -> None:
    assert scrolls_sideways(open_page, list(QUICK), [320, 390, 1280]) == []


@pytest.mark.full
def test_no_page_at_all_scrolls_sideways(open_page: Open, site: Path) -> None:
    names = sorted(str(each.relative_to(site)) for each in site.rglob("*.html"))
    names.remove("404.html")  # for servers: its style has an absolute address

    assert scrolls_sideways(open_page, names, [390, 1000, 1280]) == []


def test_a_phone_shows_each_cell_with_the_heading_of_its_column(open_page: Open) -> None:
    tab = open_page("docs/concepts.html", width=390)
    cell = tab.locator("td[data-heading='what to do']").first

    assert cell.evaluate("each => getComputedStyle(each, '::before').content") == '"what to do: "'
    assert cell.evaluate("each => getComputedStyle(each).display") == "block"


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("index.html", 1280, "light"),
        ("docs/operating.html", 390, "dark"),
        pytest.param("index.html", 1280, "dark", marks=pytest.mark.full),
        pytest.param("docs/overlays.html", 390, "dark", marks=pytest.mark.full),
        pytest.param("proof/results/other-patches.html", 1280, "light", marks=pytest.mark.full),
        pytest.param("benchmarks/results/linear_cross_entropy.html", 1280, "dark", marks=pytest.mark.full),
    ],
)
def test_an_accessibility_checker_finds_nothing(open_page: Open, name: str, width: int, scheme: str) -> None:
    check_accessible(open_page(name, width=width, scheme=scheme))


def results_of(open_page: Open, words: str) -> list[tuple[str, str]]:
    """Return of each result of a search its page and its excerpt, best first."""
    tab = open_page("index.html")
    tab.locator("[data-bs-target='#properdocs_search_modal']").click()
    tab.locator("#properdocs-search-query").fill(words)
    tab.wait_for_selector("#properdocs-search-results article")
    return [
        (each.locator("small").inner_text().strip(), each.locator("p").inner_text())
        for each in tab.locator("#properdocs-search-results article").all()
    ]


@pytest.mark.parametrize(
    ("words", "page", "says"),
    [
        ("loss is NaN after upgrade", "docs/symptoms", "Loss is NaN after a step"),
        ("loss jumps after resume", "docs/symptoms", "Loss jumps after resume"),
        ("slurm", "docs/images", "srun"),
        ("verify_ranks", "docs/operating", "verify_ranks"),
        ("loss for each token kernel", "docs/kernels", "token"),
    ],
)
def test_a_search_lists_instructions_before_measurements(open_page: Open, words: str, page: str, says: str) -> None:
    found = results_of(open_page, words)

    assert any(name == page and says.lower() in text.lower() for name, text in found[:3]), found[:3]
    folders = [name.partition("/")[0] for name, _ in found[:5]]
    assert not {"packs", "benchmarks", "proof"} & set(folders)
    assert len(found) <= 20


def test_a_result_leads_to_its_section(open_page: Open) -> None:
    tab = open_page("docs/concepts.html", query="?q=glossary")
    tab.wait_for_selector("#properdocs-search-results article")

    tab.locator("#properdocs-search-query").press("Enter")

    tab.wait_for_url("**/docs/concepts.html#glossary")


def test_a_search_without_its_pages_says_so_and_names_another_way(browser: Any, site: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(site, tmp_path / "site", ignore=shutil.ignore_patterns("packs", "proof", "benchmarks"))
    (copy / "search/pages.js").unlink()
    context = browser.new_context()
    tab = context.new_page()
    tab.goto((copy / "index.html").as_uri() + "?q=loss")

    tab.wait_for_function("document.getElementById('properdocs-search-results').textContent.includes('does not work')")
    assert "megacpp-overlays symptom WORDS" in tab.locator("#properdocs-search-results").inner_text()
    context.close()
