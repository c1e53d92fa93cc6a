"""What is kept of retired overlays, and who reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from made_up import Upstream

from megacpp_overlays.errors import RegistryError
from megacpp_overlays.loader import registry, retired
from megacpp_overlays.loader.session import Lane
from megacpp_overlays.repro import inventory

WORD = "old-fix was retired on 2026-11-21, with made-up 2.0: MEGACPP_OVERLAY_OLD_FIX does nothing and can go"


def test_every_entry_has_a_day_a_target_and_a_case_that_guards_it() -> None:
    cases = {
        (pack.number, case.overlay)
        for pack in inventory.list_packs(inventory.own_folder())
        if pack.reproducer.is_file()
        for case in inventory.load_cases(pack.reproducer)
    }
    for gone in retired.RETIRED:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", gone.date)
        assert gone.targets
        assert (gone.pack, gone.id) in cases


def test_no_overlay_of_this_package_has_the_id_of_a_retired_one() -> None:
    registry.refuse_retired(registry.load())


def test_an_overlay_with_the_id_or_the_variable_of_a_retired_one_is_refused(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = retired.Retired("double-fix", 7, "2026-11-21", "made-up", "2.0", "made-up is right", (), ())
    monkeypatch.setattr(retired, "RETIRED", (entry,))

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
    upstream: Upstream, lane: Callable[..., Lane], capsys: pytest.CaptureFixture[str], has_overlays: bool
) -> None:
    made = lane(*([upstream.overlay()] if has_overlays else []), outlived=(WORD,))

    made.arm()
    made.arm()

    assert capsys.readouterr().err.count(WORD) == 1


def test_to_undo_a_retired_overlay_is_answered_with_a_word(
    upstream: Upstream, lane: Callable[..., Lane], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = retired.Retired("old-fix", 7, "2026-11-21", "made-up", "2.0", "made-up is right", (), ())
    monkeypatch.setattr(retired, "RETIRED", (entry,))
    made = lane(upstream.overlay())
    made.arm()

    made.undo("old-fix")

    assert "old-fix was retired on 2026-11-21, with made-up 2.0: there is nothing to undo" in capsys.readouterr().err
    with pytest.raises(RegistryError, match="there is no overlay older-fix; known: double-fix"):
        made.undo("older-fix")


@pytest.mark.parametrize("settings", [{"parent_is_armed": True}, {"rank": 1}])
def test_children_and_other_ranks_do_not_repeat_it(
    upstream: Upstream, lane: Callable[..., Lane], capsys: pytest.CaptureFixture[str], settings: dict[str, object]
) -> None:
    lane(upstream.overlay(), outlived=(WORD,), **settings).arm()

    assert WORD not in capsys.readouterr().err
