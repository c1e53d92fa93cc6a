"""The ledger RETIREMENT.md is in step with the declarations, and a check notices when it is not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import Upstream
from places import ROOT

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.loader import registry
from megacpp_overlays.loader.retired import RetiredOverlay
from megacpp_overlays.model import Verdict
from megacpp_overlays.upkeep.ledger import difference, is_due, render


def test_the_ledger_of_this_repository_is_in_step() -> None:
    assert difference(registry.load(), ROOT / "RETIREMENT.md") == ""


def test_an_entry_says_all_that_a_retirement_needs(upstream: Upstream) -> None:
    text = render([upstream.overlay(unsupported={"rounded": "upstream rounds on purpose"})], None)

    for words in (
        "## double-fix (pack 99)",
        f"`{upstream.module_name}.double`",
        "`off-by-one` | `double`",
        "`rounded` | upstream rounds on purpose",
        "`MEGACPP_OVERLAY_DOUBLE_FIX=off`",
        "upstream doubles without adding one",
        "No overlay has been retired yet.",
    ):
        assert words in text


def test_a_missing_ledger_is_an_error_and_not_a_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", "--check", str(tmp_path / "nope")]) == ExitCode.NOT_CHECKED

    assert f"{tmp_path / 'nope'} is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "expected"),
    [(Verdict.FIXED, True), (Verdict.ABSENT, True), (Verdict.BROKEN, False), (Verdict.UNRECOGNISED, False)],
    ids=lambda value: value.value if isinstance(value, Verdict) else "",
)
def test_an_overlay_is_due_where_one_part_is_repaired_and_no_other_has_work_left(
    other: Verdict, expected: bool
) -> None:
    assert is_due([Verdict.FIXED, other]) is expected
    assert is_due([other, Verdict.ABSENT]) is (other is Verdict.FIXED)


def test_history_is_kept(upstream: Upstream, tmp_path: Path) -> None:
    path = tmp_path / "RETIREMENT.md"
    path.write_text(render([upstream.overlay()], None).replace("No overlay has been", "scale-pad: gone"))

    assert "scale-pad: gone" in render([upstream.overlay()], path)
    assert difference([upstream.overlay()], path) == ""


GONE = RetiredOverlay("old-fix", 7, "2026-11-21", "made-up", "2.0", "made-up is right", (), ())


def test_a_retired_overlay_is_a_row_of_the_history_and_nothing_else(upstream: Upstream, tmp_path: Path) -> None:
    path = tmp_path / "RETIREMENT.md"

    path.write_text(render([upstream.overlay()], None, [GONE]))

    assert "| `old-fix` | 07 | 2026-11-21 | made-up 2.0 | made-up is right |\n" in path.read_text()
    assert "No overlay has been retired yet." not in path.read_text()
    assert difference([upstream.overlay()], path, [GONE]) == ""
    assert "old-fix" in difference([upstream.overlay()], path, [])


@given(st.lists(st.sampled_from(["A word by hand.", "", "| a | table |", "### More", "- a point"]), max_size=6))
def test_text_by_hand_in_the_history_stays_below_the_table(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "RETIREMENT.md")
        path.write_text(render([], None) + "\n" + "\n".join(lines))

        path.write_text(once := render([], path, [GONE]))
        twice = render([], path, [GONE, GONE._replace(id="older-fix")])

    kept = "\n".join(lines).strip("\n")
    assert once.rstrip("\n").endswith(kept)
    assert twice.rstrip("\n").endswith(kept)
    assert (once.count("| `old-fix` |"), twice.count("| `old-fix` |"), twice.count("| `older-fix` |")) == (1, 1, 1)
