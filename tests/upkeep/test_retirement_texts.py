"""The texts that a retirement rewrites, and the list of what it leaves to a person."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader.retired import Retired
from megacpp_overlays.model import Target
from megacpp_overlays.upkeep.retire import kept_matrices, leftovers
from megacpp_overlays.upkeep.retire import retirement_texts as texts

GONE = Retired("old-fix", 7, "2026-11-21", "made-up", "2.0", "made-up is right", (Target("made-up", "m", "f"),), ())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "# Changelog\n\n## [Unreleased]\n\n## [0.1.0]\n\n- x\n",
            "# Changelog\n\n## [Unreleased]\n\n### Removed\n\n- gone\n\n## [0.1.0]\n\n- x\n",
        ),
        (
            "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- a\n\n### Fixed\n\n- f\n\n## [0.1.0]\n",
            "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- a\n\n### Removed\n\n- gone\n\n### Fixed\n\n- f\n\n## [0.1.0]\n",
        ),
        (
            "# Changelog\n\n## [Unreleased]\n\n### Removed\n\n- r\n",
            "# Changelog\n\n## [Unreleased]\n\n### Removed\n\n- r\n- gone\n",
        ),
        (
            "# Changelog\n\nWords.\n\n## [0.1.0]\n\n- x\n",
            "# Changelog\n\nWords.\n\n## [Unreleased]\n\n### Removed\n\n- gone\n\n## [0.1.0]\n\n- x\n",
        ),
        ("# Changelog\n", "# Changelog\n\n## [Unreleased]\n\n### Removed\n\n- gone\n"),
    ],
    ids=["empty", "between", "there already", "no Unreleased", "no release"],
)
def test_the_changelog_gets_an_entry_under_removed(before: str, after: str) -> None:
    assert texts.with_removal(before, "gone") == after


@given(st.permutations(texts.CHANGELOG_ORDER), st.integers(0, 6))
def test_nothing_in_the_changelog_is_lost_and_removed_comes_before_what_follows_it(
    order: list[str], count: int
) -> None:
    sections = "".join(f"### {name}\n\n- of {name}\n\n" for name in order[:count])
    before = f"# Changelog\n\n## [Unreleased]\n\n{sections}## [0.1.0]\n\n- x\n"

    after = texts.with_removal(before, "gone")

    assert [line for line in after.splitlines() if line and line not in {"- gone", "### Removed"}] == [
        line for line in before.splitlines() if line and line != "### Removed"
    ]
    assert after.index("### Removed") < after.index("- gone") < after.index("## [0.1.0]")
    assert "\n\n\n" not in after


def test_a_long_entry_is_wrapped() -> None:
    after = texts.with_removal("# Changelog\n\n## [Unreleased]\n", "word " * 60)

    assert max(map(len, after.splitlines())) <= texts.WIDTH
    assert after.splitlines()[7].startswith("  word")


def test_only_the_row_of_the_inventory_leaves_the_readme() -> None:
    row = "| `old-fix` | a |\n"
    text = f"# x\n\n{row}\n## What is in it\n\n| `older-fix` | b |\n{row}\n## Lanes\n\n{row}"

    assert texts.without_row(text, "old-fix") == text.replace(f"b |\n{row}", "b |\n")


@pytest.mark.parametrize(
    ("notes", "left", "expected"),
    [
        (
            "| Class | overlay |\n| Lifecycle state | validated |\n| Overlay | `old-fix` |\n",
            [],
            "| Class | regression guard |\n| Lifecycle state | retired |\n"
            "| Overlay | none; `old-fix` retired 2026-11-21, made-up 2.0 |\n",
        ),
        (
            "| Class | overlay |\n| Lifecycle state | ready |\n| Overlays | `a-fix`, `old-fix`; `b` retired earlier |\n",
            ["a-fix"],
            "| Class | overlay |\n| Lifecycle state | ready |\n"
            "| Overlays | `a-fix`; `b` retired earlier; `old-fix` retired 2026-11-21, made-up 2.0 |\n",
        ),
        (
            "| Class | overlay |\n| Lifecycle state | draft |\n| Overlay | `old-fix`, two parts |\n",
            [],
            "| Class | regression guard |\n| Lifecycle state | retired |\n"
            "| Overlay | none; `old-fix` retired 2026-11-21, made-up 2.0 |\n",
        ),
        (
            "**Class:** bug report, for now\n\nLifecycle state: draft\n",
            [],
            "**Class:** regression guard, for now\n\nLifecycle state: retired\n",
        ),
    ],
    ids=["the only one", "one of two", "in parts", "no table"],
)
def test_the_notes_of_a_pack_say_what_became_of_it(notes: str, left: list[str], expected: str) -> None:
    assert texts.of_pack(notes, GONE, left) == expected


def test_notes_that_do_not_say_what_the_pack_is_are_refused() -> None:
    with pytest.raises(UpkeepError, match="the notes of pack 07 do not say their lifecycle state"):
        texts.of_pack("Class: overlay\n", GONE, [])


# What is left to a person


def write(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return sorted(files)


def test_mentions_are_whole_words_with_file_and_line(tmp_path: Path) -> None:
    files = write(tmp_path, {"a.md": "x\n`old-fix` and 09-old-fix\n", "b.py": "old_fix\nolder-old-fixes = 1\n"})
    (tmp_path / "c.bin").write_bytes(b"\xff old-fix")
    (tmp_path / "d.md").symlink_to("a.md")

    found = leftovers.mentions(tmp_path, [*files, "c.bin", "d.md", "none.md"], {"old-fix"})

    assert list(map(str, found)) == ["a.md:2: `old-fix` and 09-old-fix"]


def test_whoever_runs_the_reproducer_of_a_pack_is_found(tmp_path: Path) -> None:
    text = 'repro("9", "--case")\nrun("repro", "09")\nrepro 9\nrepro("19")\nrepro("95")\n'
    files = write(tmp_path, {"a.py": text})

    assert [mention.line for mention in leftovers.runs_of(tmp_path, files, 9)] == [1, 2, 3]


def test_what_only_the_overlay_used_is_unused_afterwards_also_at_second_hand(tmp_path: Path) -> None:
    files = write(
        tmp_path,
        {
            "overlays/__init__.py": "",
            "overlays/old_fix.py": "def make():\n    from megacpp_overlays.kernels import old\nimport megacpp_overlays.shared\n",
            "overlays/other.py": "from megacpp_overlays import shared\n",
            "megacpp_overlays/kernels/old.py": "from megacpp_overlays.kernels.old_parts import f\nfrom . import near\n",
            "megacpp_overlays/kernels/old_parts.py": "f = 1\n",
            "megacpp_overlays/shared.py": "",
            "megacpp_overlays/never_imported.py": "",
            "tests/test_old_fix.py": "import old_cases\n",
            "tests/old_cases.py": "",
            "setup.py": "",
        },
    )
    graph = leftovers.imports(tmp_path, files)

    assert leftovers.unused(graph, ["overlays/old_fix.py", "tests/test_old_fix.py"]) == [
        "megacpp_overlays/kernels/old.py",
        "megacpp_overlays/kernels/old_parts.py",
        "tests/old_cases.py",
    ]
    assert leftovers.importers(graph, "megacpp_overlays.shared") == ["overlays/old_fix.py", "overlays/other.py"]


@pytest.mark.parametrize("half", ["def half(:\n", "import os\0"])
def test_a_file_that_is_half_written_imports_nothing(tmp_path: Path, half: str) -> None:
    files = write(tmp_path, {"half.py": half, "whole.py": "import os\n"})

    assert leftovers.imports(tmp_path, files) == {"half.py": frozenset(), "whole.py": frozenset({"os"})}


def test_tests_belong_to_the_module_with_the_longest_name() -> None:
    files = [
        "tests/test_old.py",
        "tests/test_old_probe.py",
        "tests/test_old_fix.py",
        "tests/gpu/test_old_x.py",
        "old.py",
    ]

    assert leftovers.named_after("old", ["old", "old_fix"], files) == [
        "tests/test_old.py",
        "tests/test_old_probe.py",
        "tests/gpu/test_old_x.py",
    ]


# Kept matrices


def test_a_kept_matrix_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    files = write(tmp_path, {"pages/matrix.json": "{}", "pages/matrix.html": ""})

    assert kept_matrices.folders(files) == ["pages"]
    with pytest.raises(UpkeepError, match=r"pages/matrix\.json: this is no kept matrix: KeyError"):
        kept_matrices.first_fixed(tmp_path, ["pages"], "old-fix", "2.0")


@pytest.mark.parametrize(
    ("flips", "pinned", "expected"),
    [
        ([("old-fix", "FIXED", "1.2"), ("old-fix", "BROKEN", "1.3"), ("old-fix", "FIXED", "1.10")], "2.0", "1.10"),
        ([("old-fix", "FIXED", "1.2"), ("old-fix", "FIXED", "2.1")], "2.0", "1.2"),
        ([("old-fix", "FIXED", "a tree"), ("other", "FIXED", "1.2"), ("old-fix", "ABSENT", "1.4")], "2.0", None),
        ([("old-fix", "FIXED", "1.2")], "of my own", None),
        ([], "2.0", None),
    ],
)
def test_the_last_repair_that_is_no_newer_than_the_pin_counts(
    tmp_path: Path, flips: list[tuple[str, str, str]], pinned: str, expected: str | None
) -> None:
    rows = [{"overlay": overlay, "after": after, "release": release} for overlay, after, release in flips]
    write(tmp_path, {"pages/matrix.json": json.dumps({"distributions": [{"flips": rows}]})})

    assert kept_matrices.first_fixed(tmp_path, ["pages"], "old-fix", pinned) == expected
