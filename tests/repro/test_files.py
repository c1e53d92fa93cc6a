"""A file is written whole: whoever looks, whenever, sees one text or the other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacpp_overlays.repro.files import write_text


def test_a_text_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "known.json"

    write_text(path, "first\n")
    write_text(path, "zweite Überschrift\n")

    assert path.read_text(encoding="utf-8") == "zweite Überschrift\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_at_the_last_step_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "known.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_text(path, "new")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/file")
    (tmp_path / "real" / "file").write_text("old")

    write_text(tmp_path / "link", "new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "new"
