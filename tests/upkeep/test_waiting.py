"""Overlays and packs that wait on a thread, and their declarations of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import Upstream
from made_up_packs import Packs, thread
from places import ROOT

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Thread
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.upkeep.sweep import waiting


def test_threads_of_overlays_and_packs_are_listed_once_with_all_that_wait(upstream: Upstream, tmp_path: Path) -> None:
    packs = Packs(tmp_path / "packs")
    for number, waits_on in ((5, 1), (6, 2)):
        packs.write(number, more=thread(waits_on, "o/r"))
    (packs.folder / "07-without-a-file").mkdir()
    one = upstream.overlay(threads=(Thread("o/r", 1, "open draft"),))
    two = upstream.overlay(id="other-fix", pack=4, threads=(Thread("o/r", 1, "open"), Thread("a/a", 9, "closed")))

    found = waiting.listed([one, two], packs.folder)

    assert [(str(each), each.waiters()) for each in found] == [
        ("a/a#9", "other-fix"),
        ("o/r#1", "double-fix, other-fix, pack 05"),
        ("o/r#2", "pack 06"),
    ]
    assert [each.state for each in found[1].declared] == ["open draft", "open", "open"]
    assert found[1].declared[2].where == "packs/05-double/pack.toml"


def test_the_parts_of_an_overlay_wait_as_one(upstream: Upstream, tmp_path: Path) -> None:
    thread = Thread("o/r", 1, "open")
    parts = [upstream.overlay(threads=(thread,)), upstream.overlay(threads=(thread,), retire_when="never")]

    (found,) = waiting.listed(parts, tmp_path)

    assert found.overlays == (parts[0],)
    assert len(found.declared) == 1


def test_a_pack_whose_overlay_names_the_thread_does_not_wait_as_well(upstream: Upstream, tmp_path: Path) -> None:
    Packs(tmp_path).write(more=thread(1, "o/r"))
    overlay = upstream.overlay(threads=(Thread("o/r", 1, "open"),))

    (found,) = waiting.listed([overlay], tmp_path)

    assert found.waiters() == "double-fix"
    assert len(found.declared) == 2


def test_a_pack_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    Packs(tmp_path).write(5, more=thread(0, "o/r"))

    with pytest.raises(PackError, match=r"05-double/pack\.toml"):
        waiting.listed([], tmp_path)


def test_declarations_of_this_repository_are_named_by_their_file() -> None:
    every = waiting.listed(registry.load(), ROOT / "packs")

    places = {declared.where for each in every for declared in each.declared}

    assert "overlays/liger_flce_none_backward.py" in places
    assert all((ROOT / place).is_file() for place in places)


def test_an_overlay_from_elsewhere_is_named_by_its_id(upstream: Upstream, tmp_path: Path) -> None:
    (found,) = waiting.listed([upstream.overlay(threads=(Thread("o/r", 1, "open"),))], tmp_path)

    assert found.declared[0].where == "the declaration of double-fix"
