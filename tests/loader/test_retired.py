"""Records of retired overlays, and their readers."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import Upstream

from megacpp_overlays.errors import RegistryError
from megacpp_overlays.loader import registry, retired
from megacpp_overlays.loader.retired import RetiredOverlay
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Target, Thread
from megacpp_overlays.repro import inventory

WORD = "old-fix was retired on 2026-11-21, with made-up 2.0: MEGACPP_OVERLAY_OLD_FIX does nothing and can go"


DAY = re.compile(r"\d{4}-\d\d-\d\d")
OLD_FIX = RetiredOverlay(
    "old-fix", 7, "2026-11-21", "made-up", "2.0", "made-up is right", (Target("made-up", "m", "f"),), ()
)

written = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=40)
entries = st.builds(
    RetiredOverlay,
    *(written, st.integers(0, 99), written, written, written, written),
    st.lists(st.builds(Target, written, written, written), max_size=2).map(tuple),
    st.lists(st.builds(Thread, written, st.integers(1, 9999), written), max_size=2).map(tuple),
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of entries, with one of a made-up overlay."""
    path = tmp_path / "retired.json"
    path.write_text(retired.to_json([OLD_FIX]), encoding="utf-8")
    monkeypatch.setattr(retired, "FILE", path)
    return path


@given(st.lists(entries, max_size=3))
def test_a_written_history_is_read_back_equal(several: list[RetiredOverlay]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, "retired.json")
        path.write_text(retired.to_json(several), encoding="utf-8")
        patch.setattr(retired, "FILE", path)

        assert retired.read() == tuple(several)


def test_an_entry_is_found_by_the_id_of_its_overlay(file: Path) -> None:
    assert retired.find("old-fix") == OLD_FIX
    assert retired.find("older-fix") is None


def test_an_entry_with_a_field_too_many_or_too_few_is_not_read_as_another(file: Path) -> None:
    for edit in ({"reason": "x"}, {}):
        (entry,) = json.loads(retired.to_json([OLD_FIX]))
        del entry["why"]
        file.write_text(json.dumps([entry | edit]))

        with pytest.raises(TypeError, match=r"'why'|'reason'"):
            retired.read()


def unguarded(gone: RetiredOverlay) -> list[str]:
    """Return the missing parts of an entry: a day, a target, or the case of a pack that still runs as a regression guard."""
    cases = {
        (pack.number, case.overlay)
        for pack in inventory.list_packs(inventory.own_folder())
        if pack.reproducer.is_file()
        for case in inventory.load_cases(pack.reproducer)
    }
    has = {"day": DAY.fullmatch(gone.date), "target": gone.targets, "case": (gone.pack, gone.id) in cases}
    return [name for name, there in has.items() if not there]


def test_every_entry_of_this_package_has_a_day_a_target_and_a_case_that_guards_it() -> None:
    guarded = OLD_FIX._replace(id="liger-flce-none-backward", pack=9)
    assert unguarded(guarded) == []
    assert unguarded(guarded._replace(date="today", targets=(), pack=8)) == ["day", "target", "case"]

    assert [(gone.id, unguarded(gone)) for gone in retired.read() if unguarded(gone)] == []


@pytest.mark.usefixtures("file")
def test_no_overlay_of_this_package_has_the_id_of_a_retired_one() -> None:
    overlays = registry.load()

    registry.refuse_retired(overlays)

    with pytest.raises(RegistryError, match="old-fix needs another id: old-fix was retired on 2026-11-21, with"):
        registry.refuse_retired([*overlays, replace(overlays[0], id="old-fix")])


def test_an_overlay_with_the_id_or_the_variable_of_a_retired_one_is_refused(upstream: Upstream, file: Path) -> None:
    file.write_text(retired.to_json([OLD_FIX._replace(id="double-fix")]))

    with pytest.raises(RegistryError, match="double-fix needs another id: double-fix was retired on 2026-11-21, with"):
        registry.refuse_retired([upstream.overlay()])

    registry.refuse_retired([upstream.overlay(id="double-repair")])


def test_an_import_that_names_no_retired_overlay_does_not_read_about_them(
    run_python: Callable[..., CompletedProcess[str]],
) -> None:
    code = "import sys, megacpp_overlays; assert 'megacpp_overlays.loader.retired' not in sys.modules"

    run_python(code)
    run_python(code, MEGACPP_OVERLAYS="observe", MEGACPP_OVERLAYS_DISABLE="")


@pytest.mark.parametrize("has_overlays", [True, False])
def test_the_word_about_it_is_said_once(
    upstream: Upstream, session: Callable[..., Session], capsys: pytest.CaptureFixture[str], has_overlays: bool
) -> None:
    made = session(*([upstream.overlay()] if has_overlays else []), obsolete_variables=(WORD,))

    made.arm()
    made.arm()

    assert capsys.readouterr().err.count(WORD) == 1


@pytest.mark.usefixtures("file")
def test_to_undo_a_retired_overlay_is_answered_with_a_word(
    upstream: Upstream, session: Callable[..., Session], capsys: pytest.CaptureFixture[str]
) -> None:
    made = session(upstream.overlay())
    made.arm()

    made.undo("old-fix")

    assert "old-fix was retired on 2026-11-21, with made-up 2.0: there is nothing to undo" in capsys.readouterr().err
    with pytest.raises(RegistryError, match="there is no overlay older-fix; did you mean double-fix"):
        made.undo("older-fix")


@pytest.mark.parametrize("settings", [{"parent_is_armed": True}, {"rank": 1}])
def test_children_and_other_ranks_do_not_repeat_it(
    upstream: Upstream, session: Callable[..., Session], capsys: pytest.CaptureFixture[str], settings: dict[str, object]
) -> None:
    session(upstream.overlay(), obsolete_variables=(WORD,), **settings).arm()

    assert WORD not in capsys.readouterr().err
