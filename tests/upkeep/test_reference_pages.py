"""The generated pages of docs/: their contents, and the check that finds a stale page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from made_up import Upstream
from places import ROOT

from megacpp_overlays.cli import main
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep import reference_pages


def parsers() -> dict[str, argparse.ArgumentParser]:
    """A command with two subcommands."""
    commands = argparse.ArgumentParser(prog="tool").add_subparsers()
    pack = commands.add_parser("pack", description="Do things with packs.")
    below = pack.add_subparsers()
    below.add_parser("list", description="List them.")
    below.add_parser("check", description="Check one.").add_argument("--max-age", metavar="DAYS", help="in days")
    return commands.choices


def matrix(folder: Path, **verdicts: tuple[str, str | None]) -> Path:
    """An inventory with the pack of one overlay and a kept matrix, whose releases are named `v1_0`."""
    (folder / "99-double").mkdir(parents=True)
    overlays = [{"id": "double-fix"}]
    releases = [
        {
            "name": name.removeprefix("v").replace("_", "."),
            "overlays": {"double-fix": {"verdict": verdict, "parts": [{"shape": shape}]}},
        }
        for name, (verdict, shape) in verdicts.items()
    ]
    kept = {"distributions": [{"distribution": "double", "overlays": overlays, "releases": releases}]}
    (folder / "matrix.json").write_text(json.dumps(kept))
    return folder


def test_a_command_is_shown_with_its_subcommands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")

    page = reference_pages.commands_page(parsers(), [(0, "clean")])

    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## pack",
        "## pack list",
        "## pack check",
    ]
    assert "--max-age DAYS  in days" in page, "as wide on every terminal"


def test_releases_are_ranges_of_repaired_left_alone_and_right_ones(upstream: Upstream, tmp_path: Path) -> None:
    broken, other = ("BROKEN", "off-by-one"), ("BROKEN", "off-by-two")
    packs = matrix(
        tmp_path / "packs",
        v0_9=("ABSENT", None),
        v1_0=broken,
        v1_1=broken,
        v1_2=other,
        v1_3=broken,
        v1_4=("FIXED", None),
    )

    page = reference_pages.overlays_page([upstream.overlay()], packs)

    row = next(line for line in page.splitlines() if line.startswith("| [`double-fix`]"))
    assert row.split(" | ")[2:] == ["double 1.0 to 1.1, 1.3", "double 1.2", "double 1.4 |"]
    assert row.split(" | ")[:2] == [
        "| [`double-fix`](../RETIREMENT.md#double-fix-pack-99)",
        "[99](../packs/99-double/README.md)",
    ]


def test_an_overlay_that_the_matrix_does_not_know_is_said_to_be_outside_of_it(
    upstream: Upstream, tmp_path: Path
) -> None:
    page = reference_pages.overlays_page([upstream.overlay(id="new-fix")], matrix(tmp_path / "packs"))

    assert "| not in the matrix | not in the matrix | not in the matrix |" in page


def test_pages_that_were_written_are_in_step_until_one_is_edited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reference", "--write", str(tmp_path)]) == 0
    assert main(["reference", "--check", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in (ROOT / "docs").iterdir()}

    page = tmp_path / "overlays.md"
    page.write_text(page.read_text().replace("float16-fp32-exemption", "float16-exemption"))
    capsys.readouterr()

    assert main(["reference", "--check", str(tmp_path)]) == 1
    assert "+| [`float16-fp32-exemption`](../RETIREMENT.md#float16-fp32-exemption-pack-16)" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["reference", "--check", str(tmp_path / "nowhere")])

    assert "nowhere: there is no such folder" in capsys.readouterr().err


def test_pages_of_an_inventory_without_a_matrix_are_refused(upstream: Upstream, tmp_path: Path) -> None:
    with pytest.raises(UpkeepError, match=r"there is no .*matrix\.json: run `make matrix` in a checkout"):
        reference_pages.overlays_page([upstream.overlay()], tmp_path)
