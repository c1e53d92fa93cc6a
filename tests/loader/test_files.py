"""A file is written whole: whoever looks, whenever, sees one text or the other. What is read stops nobody."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.files import read, write, write_text
from megacpp_overlays.upkeep.matrix import matrix_build, matrix_page


@contextlib.contextmanager
def only_4096_bytes() -> Iterator[None]:
    """No file may be longer, as under `ulimit -f 4`: what a full disk is to whoever writes.

    Not a fixture: what runs the tests may write to a long file of its own as soon as a test is over.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def test_of_several_files_none_is_written_unless_all_can_be(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_text("old")
    large.write_text("old")

    with only_4096_bytes(), pytest.raises(OSError, match="File too large") as refused:
        write({small: b"new", large: b"n" * 5000})

    assert refused.value.filename == str(large)
    assert [path.read_text() for path in (small, large)] == ["old", "old"]
    assert sorted(tmp_path.iterdir()) == [large, small]


def test_an_interrupt_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "known.json"
    path.write_text("old")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    path.write_text("old")
    path.chmod(0o640)

    write_text(path, "new")

    assert path.stat().st_mode & 0o777 == 0o640


def test_the_ledger_keeps_its_history_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = tmp_path / "RETIREMENT.md"
    ledger.write_text("## History\n\nWritten by hand.\n")

    with only_4096_bytes():
        ended = cli.main(["ledger", "--write", str(ledger)])

    assert ended == ExitCode.NOT_CHECKED
    assert ledger.read_text() == "## History\n\nWritten by hand.\n"
    assert capsys.readouterr().err == f"megacpp-overlays: {ledger}: File too large\n"


def test_a_ledger_that_cannot_be_written_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", "--write", str(tmp_path / "nowhere" / "RETIREMENT.md")]) == ExitCode.NOT_CHECKED
    assert "No such file or directory" in capsys.readouterr().err


def test_the_matrix_is_written_with_its_page_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_: object) -> str:
        raise UpkeepError("no page today")

    monkeypatch.setattr(matrix_page, "render", cannot)
    with pytest.raises(UpkeepError, match="no page today"):
        matrix_build.write((), tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_what_is_no_regular_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("large")

    for name, says in (("fifo", "no regular file"), ("endless", "no regular file"), ("folder", "Is a directory")):
        with pytest.raises(OSError, match=says):
            read(tmp_path / name)
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read(tmp_path / "large", 4)
    assert read(tmp_path / "link", 5) == b"12345"
