"""The kept matrix: it agrees with the probes of today, and its page is readable in a real browser."""

from __future__ import annotations

import html
import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages_in_browser import Reader, check_accessible, check_nothing_is_cut, chromium, opener
from places import FINDINGS, ROOT, WHEELS
from releases import only

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Evidence, Verdict
from megacpp_overlays.upkeep.finding_cache import FindingCache
from megacpp_overlays.upkeep.matrix import matrix, matrix_file, matrix_page
from megacpp_overlays.upkeep.matrix.archives import Archives
from megacpp_overlays.upkeep.matrix.matrix import Cell, PartFinding, Table
from megacpp_overlays.upkeep.matrix.release_pages import page_of

PACKS = ROOT / "packs"
PAGE = PACKS / "matrix.html"
KEPT = matrix_file.read(PACKS)
AGAIN = "the kept matrix is stale: run `megacpp-overlays matrix --archives .cache/wheels --write packs`"


def columns_of(table: Table) -> list[str]:
    return [column.overlay for column in table.columns]


# --- in step ---


@pytest.mark.upstream
def test_the_kept_matrix_has_the_findings_of_probes_on_the_same_files(tmp_path: Path) -> None:
    """The matrix holds the finding of every probe on every release. Tests of a probe do not repeat it."""
    overlays, archives = registry.load(), Archives(tmp_path, [WHEELS], findings=FindingCache(FINDINGS))
    now = matrix_file.again(KEPT, overlays, archives, print)
    archives.findings.save()

    assert matrix_file.differences(KEPT, now, overlays) == [], AGAIN
    assert (PACKS / "matrix.json").read_text() == matrix_file.to_text(now), AGAIN


def test_the_kept_page_is_made_from_the_kept_data() -> None:
    assert PAGE.read_text() == matrix_page.render(KEPT), AGAIN


def test_every_release_in_it_is_one_that_make_wheels_fetches() -> None:
    listed = set((ROOT / "locks" / "wheels.txt").read_text().splitlines())

    for table in KEPT:
        for row in table.rows:
            assert f"{table.distribution}=={row.name} --hash=sha256:{row.sha256}" in listed


def test_every_listed_release_of_a_target_is_in_it() -> None:
    """A new release that other tests read belongs on the page, too."""
    kept = {(table.distribution, row.name) for table in KEPT for row in table.rows}
    names = {table.distribution for table in KEPT}
    listed = re.findall(r"^([a-z0-9-]+)==(\S+) ", (ROOT / "locks" / "wheels.txt").read_text(), re.MULTILINE)

    assert {each for each in listed if each[0] in names} == kept


# --- the page as text ---


def test_the_page_asks_for_nothing_and_every_link_leads_to_a_place_on_it() -> None:
    page = Reader(PAGE.read_text())

    assert page.loads == ["data:,", "script"], "the inline script that shows and hides entries"
    inside = {link[1:] for link in page.links if link.startswith("#")}
    assert inside <= set(page.ids)
    assert all(link.startswith("https://github.com/") for link in page.links if not link.startswith("#"))
    assert len(page.ids) == len(set(page.ids))
    assert "url(" not in PAGE.read_text()
    assert "@import" not in PAGE.read_text()


def test_the_page_is_small() -> None:
    assert len(PAGE.read_bytes()) < 8_500 * sum(len(table.columns) for table in KEPT)


def test_each_overlay_has_a_row_with_the_verdicts_of_its_releases() -> None:
    page = Reader(PAGE.read_text())
    shown = [rows for rows in page.tables if "overlay or gate" in rows[0][0]]  # a table of flips may follow each

    assert set(page.scopes) == {"col", "row"}
    for table, rows in zip(KEPT, shown, strict=True):
        assert [cell.strip() for cell in rows[0]] == ["overlay or gate", "by release"]
        assert [cells[0].split()[0] for cells in rows[1:]] == list(columns_of(table))
        for name, cells in zip(columns_of(table), rows[1:], strict=True):
            said = re.findall(r"(BROKEN|FIXED|ABSENT|UNRECOGNISED) (\S+)(?: to (\S+))?", " ".join(cells[1].split()))
            names = [row.name for row in table.rows]
            listed: dict[str, str] = {}
            for verdict, first, last in said:
                listed |= dict.fromkeys(names[names.index(first) : names.index(last or first) + 1], verdict)
            assert listed == {row.name: row.cells[name].verdict.value for row in table.rows}


def test_flips_are_listed_with_version_and_date() -> None:
    every = [
        {
            (f.row.name, f.row.date, name, f.before.value, f.after.value)
            for name in columns_of(table)
            for f in matrix.flips(table, name)
        }
        for table in KEPT
    ]
    shown = [rows for rows in Reader(PAGE.read_text()).tables if "overlay or gate" not in rows[0][0]]
    for expected, rows in zip(filter(None, every), shown, strict=True):
        listed = [" ".join(cells).replace("→", " ").split() for cells in rows[1:]]
        assert {tuple(each) for each in listed} == expected
        assert len(listed) == len(expected)


def test_upstream_s_words_are_text_and_never_markup() -> None:
    table = KEPT[-1]
    nasty = "<script>alert(1)</script>"
    part = PartFinding(module="m", verdict=Verdict.UNRECOGNISED, shape=None, evidence=(Evidence(seen=nasty),))
    row = replace(table.rows[-1], cells={columns_of(table)[0]: Cell(parts=(part,))}, yanked=nasty)

    text = matrix_page.render([replace(table, columns=table.columns[:1], rows=(row,))])

    assert text.count("<script") == 1, "our own"
    assert "alert(1)</script" not in text
    assert text.count("&lt;script&gt;") == 2


def test_a_release_leads_to_its_tag_and_one_without_a_known_tag_is_no_link() -> None:
    linked = [each for each in Reader(PAGE.read_text()).links if "/releases/tag/" in each]

    assert "https://github.com/NVIDIA/Megatron-LM/releases/tag/core_v0.19.0" in linked
    assert "https://github.com/tile-ai/tilelang/releases/tag/v0.1.13" in linked
    assert not [each for each in linked if each.endswith(("core_v0.19.2", "v0.1.15"))]
    assert page_of("tilelang", "0.1") is None
    assert page_of("nothing", "0.1.13") is None


def test_gates_name_the_next_step_and_the_release_they_were_combined_with() -> None:
    text = " ".join(re.sub("<[^>]+>", " ", PAGE.read_text()).split())

    assert "mamba3-mimo-reduce-layout gate, beside mamba-ssm 2.3.2.post1" in text
    for gate in (each for each in registry.load() if not each.installs):
        assert all(html.unescape(text).count(advice) == 1 for advice in gate.unsupported.values())


def test_a_table_without_flips_and_with_other_dates_says_so() -> None:
    table = KEPT[-1]
    row = replace(table.rows[0], dated=matrix.BUILT)

    text = matrix_page.render([replace(table, rows=(row,))])

    assert "None: every verdict is the same in all releases." in text
    assert f"{row.date} built" in text
    assert "unless said otherwise" in text


# --- the page in a browser ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from chromium()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    yield from opener(browser, PAGE)


def picked(page: Any, **versions: str) -> set[str]:
    """Pick versions; return the overlays that the page says matter."""
    for name, version in versions.items():
        page.locator(f"select[name='{name.replace('_', '-')}']").select_option(version)
    return set(page.locator(".answers li:visible a").all_inner_texts())


def expected(**versions: str) -> set[str]:
    """Return the overlays and gates whose probe says BROKEN of one of these versions, or of the newest where none is given.

    A column about a combination counts only if its other distribution has the version that is picked.
    """
    together = {f"{name.replace('_', '-')} {version}" for name, version in versions.items()}
    return {
        column.overlay
        for table in KEPT
        for row in table.rows
        if row.name == versions.get(table.distribution.replace("-", "_"), table.rows[-1].name)
        for column in table.columns
        if row.cells[column.overlay].verdict is Verdict.BROKEN
        if column.beside is None or column.beside in together
    }


@pytest.mark.parametrize(
    "versions",
    [
        {table.distribution.replace("-", "_"): table.rows[-1].name for table in KEPT},
        {
            "megatron_core": "0.18.2",
            "mamba_ssm": "2.3.0",
            "tilelang": "0.1.15",
            "liger_kernel": "0.8.1",
            "triton": "3.6.0",
        },
        pytest.param(
            {"megatron_core": "", "mamba_ssm": "2.3.2.post1", "tilelang": "0.1.12", "liger_kernel": ""},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"megatron_core": "0.16.1", "mamba_ssm": "", "tilelang": "", "liger_kernel": "", "triton": "3.5.1"},
            marks=pytest.mark.full,
        ),
        {"megatron_core": "", "mamba_ssm": "", "tilelang": "", "liger_kernel": "", "triton": ""},
    ],
    ids=["newest", "summer, of a combination one", "the right one of a combination", "one alone", "none"],
)
def test_picked_versions_show_the_defects_that_matter(open_page: Open, versions: dict[str, str]) -> None:
    page = open_page()

    assert picked(page, **versions) == expected(**versions)

    status = page.locator(".pick [role=status]").inner_text()
    assert status.startswith(f"{len(expected(**versions))} defects" if expected(**versions) else "None of the defects")


def test_a_combination_matters_only_where_both_of_it_are_picked(open_page: Open) -> None:
    page = open_page()
    gate = "mamba3-mimo-reduce-layout"

    assert gate in picked(page, mamba_ssm="2.3.2.post1", tilelang="0.1.15")
    assert gate not in picked(page, mamba_ssm="2.3.2.post1", tilelang="0.1.12")
    assert gate not in picked(page, mamba_ssm="2.3.1", tilelang="0.1.15")
    assert gate not in picked(page, mamba_ssm="", tilelang="0.1.15")


def test_versions_are_picked_with_the_keyboard(open_page: Open) -> None:
    page = open_page()
    names = page.locator("select").first.evaluate("each => [...each.options].map(option => option.value)")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")

    assert page.evaluate("document.activeElement.tagName") == "SELECT"
    page.keyboard.press("ArrowDown")

    assert page.locator("select").first.input_value() == names[2]
    assert page.locator(".pick [role=status]").inner_text().endswith("in what you picked:")


OLDER = {"megacpp": "0", "megatron-core": "0.18.2", "liger-kernel": "0.8.1"}
"""Versions in the address: two releases, and a distribution that is not on the page."""


def values(page: Any) -> dict[str, str]:
    return {table.distribution: page.locator(f"select[name='{table.distribution}']").input_value() for table in KEPT}


def test_an_address_leads_to_a_release_with_its_defects(open_page: Open) -> None:
    page = open_page(at="#megatron-core=0.18.2")

    assert values(page) == {table.distribution: table.rows[-1].name for table in KEPT} | {"megatron-core": "0.18.2"}
    newest = {table.distribution.replace("-", "_"): table.rows[-1].name for table in KEPT}
    shown = set(page.locator(".answers li:visible a").all_inner_texts())
    assert shown == expected(**newest | {"megatron_core": "0.18.2"})
    page.wait_for_function("Math.abs(document.getElementById('pick').getBoundingClientRect().top) < 200")


def test_an_address_can_name_several_releases_and_one_that_is_not_here_is_passed_over(open_page: Open) -> None:
    page = open_page(at="#" + "&".join(f"{name}={release}" for name, release in OLDER.items()))

    assert values(page)["megatron-core"] == "0.18.2"
    assert values(page)["liger-kernel"] == "0.8.1"


def test_picked_versions_are_there_after_a_reload(open_page: Open) -> None:
    page = open_page()
    before = picked(page, megatron_core="0.17.1", triton="")

    page.reload()

    assert (values(page)["megatron-core"], values(page)["triton"]) == ("0.17.1", "")
    assert set(page.locator(".answers li:visible a").all_inner_texts()) == before


def test_each_release_has_a_place_that_lists_its_defects_without_script_too(browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(PAGE.as_uri() + "#megatron-core=0.18.2")

    assert page.locator(":target").is_visible()
    table = next(table for table in KEPT if table.distribution == "megatron-core")
    row = next(row for row in table.rows if row.name == "0.18.2")
    broken = [name for name in columns_of(table) if row.cells[name].verdict is Verdict.BROKEN]
    assert page.locator(":target a").all_inner_texts() == broken
    context.close()
    ids = set(Reader(PAGE.read_text()).ids)
    assert {f"{table.distribution}={row.name}" for table in KEPT for row in table.rows} <= ids


def test_without_script_the_newest_releases_are_answered_for(browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(PAGE.as_uri())

    newest = {table.distribution.replace("-", "_"): table.rows[-1].name for table in KEPT}
    assert set(page.locator(".answers li:visible a").all_inner_texts()) == expected(**newest)
    assert not page.locator("select").first.is_visible()
    context.close()


def test_there_are_few_stops_on_the_way_through_it(open_page: Open) -> None:
    page = open_page()

    stops = page.evaluate("""() => [...document.querySelectorAll("a, select, summary, [tabindex]")].filter(
        each => each.checkVisibility() && each.tabIndex >= 0).length""")

    assert stops < 6 * sum(len(table.columns) for table in KEPT)


def test_an_accessibility_checker_finds_nothing(browser: Any, tmp_path: Path) -> None:
    """The checker's time grows with the page, so this page is of the same kind and smaller."""
    page = tmp_path / "page.html"
    page.write_text(matrix_page.render([some_of(KEPT[0], 4), some_of(KEPT[1], 2)]))

    for load in opener(browser, page):
        check_accessible(load())


def some_of(table: Table, count: int) -> Table:
    """Return a table with its first columns, those that flip before others."""
    columns = sorted(table.columns, key=lambda each: not matrix.flips(table, each.overlay))[:count]
    rows = [replace(row, cells={each.overlay: row.cells[each.overlay] for each in columns}) for row in table.rows]
    return replace(table, columns=tuple(columns), rows=tuple(rows))


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_accessibility_checker_finds_nothing_on_the_whole_page(open_page: Open, scheme: str) -> None:
    check_accessible(open_page(scheme=scheme))


def test_evidence_opens_with_the_keyboard_and_with_a_click(open_page: Open) -> None:
    page = open_page()
    name = columns_of(KEPT[0])[0]
    details = page.locator(f"details#{name}")
    assert not details.locator(".runs").is_visible()

    details.locator("summary").focus()
    page.keyboard.press("Enter")
    assert details.locator(".runs").is_visible()
    page.keyboard.press("Enter")
    assert not details.locator(".runs").is_visible()
    details.locator("summary").click()
    assert details.locator(".runs").is_visible()


def test_a_flip_leads_to_its_evidence_and_opens_it(open_page: Open) -> None:
    page = open_page()
    table = KEPT[0]
    flip = next(flip for name in columns_of(table) for flip in matrix.flips(table, name))
    row = page.locator("table.flips").first.locator("tbody tr", has_text=flip.row.name).filter(has_text=flip.overlay)

    row.locator("a", has_text=flip.overlay).click()

    shown = page.locator(":target")
    assert shown.is_visible()
    assert flip.row.name in shown.inner_text()
    assert str(flip.row.cells[flip.overlay].telling[-1].evidence[0].seen) in shown.inner_text()


@pytest.mark.parametrize(
    ("width", "scheme"),
    only(itertools.product([320, 390, 1280, 1920], ["light", "dark"]), [(320, "light"), (390, "dark")]),
)
def test_nothing_is_cut_at_any_width(open_page: Open, width: int, scheme: str) -> None:
    check_nothing_is_cut(open_page(width=width, scheme=scheme), width)


CONTRAST = """() => {
    const parse = text => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const below = element => {
        for (let each = element; each; each = each.parentElement) {
            const colour = parse(getComputedStyle(each).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    document.querySelectorAll("details").forEach(each => { each.open = true; });
    const bad = [];
    let seen = 0;
    for (const element of document.querySelectorAll("body *")) {
        if (![...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
        const [one, other] = [light(parse(getComputedStyle(element).color)), light(below(element))].sort((a, b) => b - a);
        const ratio = (one + 0.05) / (other + 0.05);
        seen += 1;
        if (ratio < 4.5) bad.push([element.outerHTML.slice(0, 80), ratio]);
    }
    return [seen, bad];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_in_light_and_in_dark(open_page: Open, scheme: str) -> None:
    page = open_page(scheme=scheme, at=f"#{columns_of(KEPT[0])[0]}-{KEPT[0].rows[0].name}")

    seen, bad = page.evaluate(CONTRAST)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert seen > 500
    assert bad == []
    assert (sum(map(int, re.findall(r"\d+", paper))) > 380) == (scheme == "light")


def test_the_browser_is_found_by_the_script_and_a_wrong_one_is_passed_over() -> None:
    env = {**os.environ, "MEGACPP_BROWSER": "/bin/false"}

    done = subprocess.run([ROOT / "scripts" / "browser.sh"], capture_output=True, text=True, env=env)

    assert done.returncode == 0
    assert "/bin/false" not in done.stdout


@pytest.fixture
def without_browser(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a copy of the script where there is no browser, and where npm brings another archive than was published."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    script = Path(shutil.copy(ROOT / "scripts" / "browser.sh", tmp_path / "scripts"))
    for name in ("bash", "dirname", "mkdir", "mktemp", "rm", "uname"):
        if found := shutil.which(name):
            (tmp_path / "bin" / name).symlink_to(found)
    for name, text in (("npm", "echo other >chromium.tgz"), ("node", "echo sha512-other")):
        (tmp_path / "bin" / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def call(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        env["PATH"] = str(tmp_path / "bin")
        return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, env=env)

    return call


ScriptRun = Callable[..., "subprocess.CompletedProcess[str]"]


def test_without_a_browser_the_script_says_nothing_and_is_content(without_browser: ScriptRun) -> None:
    done = without_browser()

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_where_a_browser_is_required_none_is_a_failure(without_browser: ScriptRun) -> None:
    done = without_browser(MEGACPP_REQUIRE_BROWSER="1")

    assert done.returncode == 1
    assert "no browser: none is on this machine" in done.stderr
    assert "MEGACPP_REQUIRE_BROWSER" in done.stderr


@pytest.mark.skipif(platform.system() + platform.machine() != "Linuxx86_64", reason="nothing is fetched elsewhere")
def test_an_archive_that_is_not_the_published_one_is_a_failure(without_browser: ScriptRun, tmp_path: Path) -> None:
    done = without_browser("--fetch")

    assert done.returncode == 1
    assert "is not @sparticuz/chromium@" in done.stderr
    assert list((tmp_path / ".cache").iterdir()) == []


@pytest.mark.skipif(platform.system() + platform.machine() != "Linuxx86_64", reason="nothing is fetched elsewhere")
@pytest.mark.parametrize(("variable", "code"), [("UNRELATED", 0), ("MEGACPP_REQUIRE_BROWSER", 1)])
def test_an_archive_that_cannot_be_fetched_is_passed_over_unless_a_browser_is_required(
    without_browser: ScriptRun, tmp_path: Path, variable: str, code: int
) -> None:
    (tmp_path / "bin" / "npm").write_text(f"#!{shutil.which('bash')}\nexit 1\n")

    done = without_browser("--fetch", **{variable: "1"})

    assert done.returncode == code
    assert "npm could not fetch it" in done.stderr
