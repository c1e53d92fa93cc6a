"""RETIREMENT.md is in step with the declarations, and a check notices when it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from made_up import Upstream

from megacpp_overlays import registry
from megacpp_overlays.ledger import difference, render


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


@pytest.mark.parametrize(
    "edit", [str.upper, lambda text: text.replace("99", "98"), lambda _: ""], ids=["case", "pack", "empty"]
)
def test_an_edited_or_missing_ledger_is_out_of_step(
    upstream: Upstream, tmp_path: Path, edit: Callable[[str], str]
) -> None:
    path = tmp_path / "RETIREMENT.md"
    path.write_text(edit(render([upstream.overlay()], None)))

    assert difference([upstream.overlay()], path)


def test_history_is_kept(upstream: Upstream, tmp_path: Path) -> None:
    path = tmp_path / "RETIREMENT.md"
    path.write_text(render([upstream.overlay()], None).replace("No overlay has been", "scale-pad: gone"))

    assert "scale-pad: gone" in render([upstream.overlay()], path)
    assert difference([upstream.overlay()], path) == ""
