"""The HTML page of one audit, or of two: for a team lead, in any browser, without a request."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pages_in_browser import Reader, check_accessible, check_nothing_is_cut, chromium, opener
from places import ROOT
from releases import only

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.loader import registry
from megacpp_overlays.loader.decisions import FIRST
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode, Settings
from megacpp_overlays.model import Decision
from megacpp_overlays.upkeep import audit_diff
from megacpp_overlays.upkeep.pages import run_page

PACKS = ROOT / "packs"
MADE = datetime(2026, 11, 23, 12, 30, tzinfo=timezone.utc)
NASTY = "<script>alert(1)</script>"
OVERLAYS = registry.load()
IDS = {each.id for each in OVERLAYS}
ONE_OF_EACH = dict(zip(Decision, dict.fromkeys(each.id for each in OVERLAYS if each.installs), strict=False))


@pytest.fixture(scope="module")
def audit() -> dict[str, Any]:
    """An audit of the real overlays, edited so that each decision is taken for one overlay. The others were not decided."""
    data = json.loads(Session(OVERLAYS, Settings(mode=Mode.OFF)).audit().to_json())
    for decision, overlay_id in ONE_OF_EACH.items():
        for each in data["decisions"]:
            if each["id"] == overlay_id:
                each |= {"decision": decision.value, "reason": f"so it is {NASTY}", "evidence": [f"seen {NASTY}"]}
                each |= {"seams": ["some.module.function"], "version": "1.2.3", "verdict": "BROKEN", "shape": "odd"}
    return data


@pytest.fixture(scope="module")
def page(audit: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    changed = json.loads(json.dumps(audit))
    changed["decisions"][0] |= {"version": "9.9", "source_sha256": "f" * 64}
    run = run_page.RunOnPage(audit, MADE, "8 ranks agree", ("monday.json", audit_diff.changes(changed, audit)))
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_text(run_page.render(run, OVERLAYS, PACKS))
    return path


def test_a_page_with_a_model_marks_the_overlays_that_concern_it(audit: dict[str, Any]) -> None:
    active = [each["id"] for each in audit["decisions"] if each["decision"] == "active"]
    first, *others = dict.fromkeys(each["id"] for each in audit["decisions"])
    answers = {first: "no", active[0]: "undecided", **dict.fromkeys(set(others) - {active[0]}, "yes")}
    model = {
        "origin": f"train.sh {NASTY}",
        "concerns": answers,
        "because": {first: "no experts", active[0]: "packed rows"},
    }

    shown = run_page.render(run_page.RunOnPage({**audit, "model": model}, MADE), OVERLAYS, PACKS)

    assert f"{len(set(active))} of {len(set(active))} active overlays concern it, train.sh &lt;script&gt;" in shown
    assert shown.count("does not concern this model: no experts") == 1
    assert shown.count("may concern this model: packed rows") == 1
    assert "this model" not in run_page.render(run_page.RunOnPage(audit, MADE), OVERLAYS, PACKS)


def test_it_loads_nothing_and_every_link_leads_to_a_place_on_it_or_to_a_thread(page: Path) -> None:
    read = Reader(page.read_text())

    assert read.loads == ["data:,", "script"], "no address of a script or a style"
    inside = [link[1:] for link in read.links if link.startswith("#")]
    assert set(inside) <= set(read.ids)
    assert len(read.ids) == len(set(read.ids))
    assert all(link.startswith("https://github.com/") for link in read.links if not link.startswith("#"))
    assert read.levels[0] == 1
    assert all(below - above <= 1 for above, below in zip(read.levels, read.levels[1:], strict=False))


def test_upstream_s_words_are_text_and_never_markup(page: Path) -> None:
    assert page.read_text().count("<script") == 1, "our own"
    assert "alert(1)</script" not in page.read_text()
    assert "&lt;script&gt;" in page.read_text()


def test_invisible_characters_are_escaped(audit: dict[str, Any]) -> None:
    """Escape sequences, which a terminal obeys that the page is printed on, and marks that turn the direction of a text."""
    changed = json.loads(json.dumps(audit))
    for each in changed["decisions"]:
        each |= {"reason": "a\x1b[2Jb\x00\x9b\u202ec\ud800\td", "evidence": ["e\x07"]}

    text = run_page.render(run_page.RunOnPage(changed, MADE, "", None), OVERLAYS, PACKS)

    assert r"a\x1b[2Jb\x00\x9b\u202ec\ud800" + "\td" in text
    assert {each for each in text if not each.isprintable()} == {"\n", "\t"}


def test_each_overlay_is_there_once_under_the_decision_that_matters_most(page: Path, audit: dict[str, Any]) -> None:
    text = page.read_text()
    sections = {each.partition('"')[0]: each for each in text.split('<section aria-labelledby="')[1:]}
    decided: dict[str, list[Decision]] = {}
    for each in audit["decisions"]:
        decided.setdefault(each["id"], []).append(Decision(each["decision"]))

    decisions = ["conflict", "unproved", "gated", "active", "retired", "armed", "disabled", "absent"]
    assert list(sections) == ["compared", *decisions]
    for overlay_id, found in decided.items():
        holding = [name for name, each in sections.items() if name != "compared" and f">{overlay_id}<" in each]
        assert holding == [min(found, key=FIRST.index).value]


def test_an_active_overlay_has_its_reason_its_date_and_its_condition_of_retirement(page: Path) -> None:
    overlay = next(each for each in OVERLAYS if each.id == ONE_OF_EACH[Decision.ACTIVE])
    article = page.read_text().partition(f'id="active-{overlay.id}"')[2].partition("</details>")[0]
    text = " ".join(article.replace("&#39;", "'").replace("&#34;", '"').split())

    for words in (
        overlay.title,
        overlay.breaks,
        overlay.retire_when,
        f"{overlay.variable}=off",
        "some.module.function",
    ):
        assert words in text
    assert f"Releases of {overlay.target.distribution}" in text
    assert all(f"/{thread.repository}/issues/{thread.number}" in text for thread in overlay.threads)


def test_changes_are_listed_by_overlay_with_hashes_cut_short(page: Path, audit: dict[str, Any]) -> None:
    part = page.read_text().partition('id="compared"')[2].partition("</section>")[0]

    assert "Since monday.json" in part
    assert f"<code>{audit['decisions'][0]['id']}</code>" in part
    assert f"{'f' * 12}…" in part
    assert "f" * 13 not in part


def test_a_kept_audit_of_an_overlay_that_is_gone_has_a_page_too(audit: dict[str, Any]) -> None:
    gone = {"id": "gone-fix", "target": "m.f", "decision": "active"}
    text = run_page.render(run_page.RunOnPage({**audit, "decisions": [gone]}, MADE), OVERLAYS, PACKS)

    assert ">gone-fix<" in text
    assert "not compared by what made this page" in text


def test_audit_and_compare_write_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], audit: dict[str, Any]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(audit))
    html = tmp_path / "page.html"

    assert (
        cli.main(["compare", "--html", str(html), *(str(tmp_path / f"{name}.json") for name in "ab")]) == ExitCode.CLEAN
    )

    assert "Nothing since a.json." in html.read_text()
    assert capsys.readouterr().out == "Nothing has changed.\n"


# --- in a browser ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from chromium()


@pytest.fixture
def shown(browser: Any, page: Path) -> Iterator[Callable[..., Any]]:
    yield from opener(browser, page)


@pytest.mark.parametrize(
    ("width", "scheme"),
    only(itertools.product([320, 390, 1280, 1920], ["light", "dark"]), [(320, "light"), (390, "dark")]),
)
def test_nothing_is_cut_at_any_width(shown: Callable[..., Any], width: int, scheme: str) -> None:
    check_nothing_is_cut(shown(width=width, scheme=scheme), width)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_an_accessibility_checker_finds_nothing(shown: Callable[..., Any], scheme: str) -> None:
    check_accessible(shown(scheme=scheme))


def test_evidence_opens_with_the_keyboard(shown: Callable[..., Any]) -> None:
    tab = shown()
    details = tab.locator(".overlay:visible").first
    assert not details.locator("ul").first.is_visible()

    details.locator("summary").focus()
    tab.keyboard.press("Enter")

    assert details.locator("ul").first.is_visible()


@pytest.mark.parametrize("decision", [Decision.ACTIVE, pytest.param(Decision.CONFLICT, marks=pytest.mark.full)])
def test_the_page_of_all_overlays_is_at_most_4000_pixels_high_at_first_sight(
    browser: Any, audit: dict[str, Any], tmp_path: Path, decision: Decision
) -> None:
    """With each overlay in the longest group and with a reason of many lines."""
    data = json.loads(json.dumps(audit))
    for each in data["decisions"]:
        each |= {"decision": decision.value, "reason": "a reason that goes on and on, " * 40, "evidence": ["seen"] * 9}
    path = tmp_path / "page.html"
    path.write_text(run_page.render(run_page.RunOnPage(data, MADE), OVERLAYS, PACKS))

    for load in opener(browser, path):
        tab = load(width=1280)
        assert tab.locator(".overlay:visible").count() == len(IDS)
        assert tab.evaluate("document.documentElement.scrollHeight") <= 4000


def ids_shown(tab: Any) -> set[str]:
    return set(tab.locator(".overlay:visible > summary b").all_inner_texts())


def test_words_leave_the_overlays_that_have_all_of_them_and_open_their_groups(shown: Callable[..., Any]) -> None:
    tab = shown()
    groups = tab.locator(".group[open]").count()

    tab.locator("[type=search]").fill("resume rollback")

    assert ids_shown(tab) == {each.id for each in OVERLAYS if "resume or rollback" in " ".join(each.symptoms)}
    assert tab.locator(".filter [role=status]").inner_text() == f"1 of {len(IDS)} overlays and gates"

    tab.locator("[type=search]").fill("")
    assert tab.locator(".group[open]").count() == groups


def test_a_decision_that_is_unticked_is_not_shown(shown: Callable[..., Any]) -> None:
    tab = shown()
    assert ONE_OF_EACH[Decision.CONFLICT] in ids_shown(tab)

    tab.get_by_label("conflict").uncheck()

    assert ONE_OF_EACH[Decision.CONFLICT] not in ids_shown(tab)
    assert ONE_OF_EACH[Decision.ACTIVE] in ids_shown(tab)


def test_without_script_nothing_is_hidden_and_no_filter_is_offered(browser: Any, page: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.as_uri())

    assert not tab.locator(".filter").is_visible()
    assert tab.locator(".group:visible").count() == len(ONE_OF_EACH)
    context.close()


def test_a_link_to_an_overlay_opens_the_group_that_it_is_in(shown: Callable[..., Any]) -> None:
    overlay_id = ONE_OF_EACH[Decision.ABSENT]
    tab = shown(at=f"#absent-{overlay_id}")

    assert tab.locator(f"#absent-{overlay_id} > summary").is_visible()


def test_a_count_leads_to_its_overlays(shown: Callable[..., Any]) -> None:
    tab = shown()

    tab.locator(".counts a", has_text="active").click()

    assert tab.locator(":target").inner_text() == run_page.HEADINGS[Decision.ACTIVE]


# --- calls that were counted ---


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ({"some.module.function": 1200}, "</code>, called 1,200 times"),
        ({"some.module.function": 0}, "</code>, never called"),
        ({}, "</code></li>"),
    ],
)
def test_the_page_of_a_run_says_how_often_a_seam_was_called(
    audit: dict[str, Any], calls: dict[str, int], says: str
) -> None:
    data = json.loads(json.dumps(audit))
    active = next(each for each in data["decisions"] if each["decision"] == "active")
    others = [each for each in data["decisions"] if each["decision"] == "conflict"]
    active["calls"], others[0]["calls"] = calls, {"some.module.function": 7}

    text = run_page.render(run_page.RunOnPage(data, MADE, "", None), OVERLAYS, PACKS)

    assert f"replaced <code>some.module.function{says}" in text[text.index(active["id"]) :]


def test_the_page_of_an_audit_before_any_run_says_nothing_of_calls(audit: dict[str, Any]) -> None:
    data = json.loads(json.dumps(audit))
    for each in data["decisions"]:
        each["calls"] = dict.fromkeys(each["seams"], 0)

    assert "called" not in run_page.render(run_page.RunOnPage(data, MADE, "", None), OVERLAYS, PACKS)
