"""Plots of kept numbers: their content for readers and for screen readers."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
from places import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
    return found


def parts(drawn: str) -> tuple[ElementTree.Element, list[str], list[float]]:
    """Return the root, all words and the widths of all bars but the paper."""
    root = ElementTree.fromstring(drawn)
    words = [each.text or "" for each in root.iter(f"{SVG}text")]
    return root, words, [float(each.attrib["width"]) for each in root.iter(f"{SVG}rect")][1:]


def is_named(root: ElementTree.Element) -> bool:
    named = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    return root.attrib["role"] == "img" and all(each is not None and each.text for each in named)


def test_a_step_has_a_bar_for_each_stage_as_wide_as_it_takes() -> None:
    from linear_cross_entropy_step.plot import svg

    found = kept("linear_cross_entropy_step")
    root, words, bars = parts(svg(found))

    ways = {name: row for name, row in found["times"].items() if not name.endswith(", alone")}
    assert is_named(root)
    assert set(ways) <= set(words)
    stages = [stage for row in ways.values() for stage in row["stages"]]
    shown = bars[3:]  # after the legend
    assert len(shown) == len(stages)
    ratios = [width / stage for width, stage in zip(shown, stages, strict=True)]
    assert max(ratios) < 1.02 * min(ratios)


def test_a_way_that_did_not_fit_has_no_bar_and_a_run_that_was_cut_has_a_sheet() -> None:
    from linear_cross_entropy_step.plot import svg

    found = kept("linear_cross_entropy_step")
    found["times"]["Megatron, unfused"] = None
    assert "Megatron, unfused" not in parts(svg(found))[1]
    del found["times"]
    root, words, _ = parts(svg(found))
    assert is_named(root)
    assert any("No step was timed" in each for each in words)


def test_ranks_have_a_panel_for_each_group_and_a_line_where_their_products_are() -> None:
    from linear_cross_entropy_ranks.plot import svg

    found = kept("linear_cross_entropy_ranks")
    root, words, bars = parts(svg(found))

    rows = [
        row for size, each in found["sizes"].items() for row in each["times"] if row["name"].startswith(f"TP={size},")
    ]
    assert is_named(root)
    assert [f"{size} ranks" for size in found["sizes"]] == [each for each in words if each.endswith(" ranks")]
    ratios = [width / row["ms"] for width, row in zip(bars[2:], rows, strict=True)]
    assert max(ratios) < 1.02 * min(ratios)
    assert len(list(root.iter(f"{SVG}line"))) == len(rows) + 1


def test_ranks_without_times_have_a_sheet() -> None:
    from linear_cross_entropy_ranks.plot import svg

    found = kept("linear_cross_entropy_ranks")
    found["sizes"] = {"2": {"correctness": []}}

    assert is_named(parts(svg(found))[0])


def test_chosen_keys_have_a_bar_for_each_who_takes_a_shape_as_long_as_it_is_fast() -> None:
    from sparse_attention.plot import svg

    found = kept("sparse_attention")
    root, words, bars = parts(svg(found))

    assert is_named(root)
    assert {shape["name"] for shape in found["shapes"]} <= set(words)
    both = {"ours", "Megatron, none", "bare products"}
    raced = [
        (shape["forward_flops"] + shape["backward_flops"]) / row["ms"]
        for shape in found["shapes"]
        for row in shape["contestants"].values()
        if row and len(row["stages"]) == 2
    ]
    ratios = [width / rate for width, rate in zip(bars, raced, strict=True)]
    assert max(ratios) < 1.03 * min(ratios)
    assert {name for shape in found["shapes"] for name in shape["contestants"]} & both == both & set(words)
    missing = [row for shape in found["shapes"] for row in shape["contestants"].values() if row is None]
    assert words.count("does not fit") == len(missing)


def test_chosen_keys_without_a_shape_have_a_sheet() -> None:
    from sparse_attention.plot import svg

    root, words, bars = parts(svg(kept("sparse_attention") | {"shapes": []}))

    assert is_named(root)
    assert bars == []
    assert any("No shape was timed" in each for each in words)


def test_progress_names_the_measurement_its_number_and_the_time_so_far(capfd: pytest.CaptureFixture[str]) -> None:
    from progress import Progress

    seen = [(step, capfd.readouterr().err) for step in Progress().each([("one", 1), ("two", 2)])]

    assert seen == [(1, "[1/2] one (0 s so far)\n"), (2, "[2/2] two (0 s so far)\n")]
