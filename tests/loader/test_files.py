"""Atomic writes, in which a reader always sees the old or the new text, and reads that never block."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_overlays import cli, files
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import SettingsError, UpkeepError
from megacpp_overlays.files import read, write, write_text
from megacpp_overlays.loader.log import Log
from megacpp_overlays.loader.settings import LogForm, Settings
from megacpp_overlays.upkeep.matrix import matrix_build, matrix_page


@contextlib.contextmanager
def only_4096_bytes() -> Iterator[None]:
    """Limit files to 4096 bytes, as under `ulimit -f 4`: for the writer this is like a full disk.

    Not a fixture: the test runner may write to a long file of its own as soon as a test is over.
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


def test_a_fifo_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    write_text(path, "for the reader\n")
    write_text(tmp_path / "fifo", "and more\n")

    assert os.read(reader, 100) == b"for the reader\nand more\n"
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]
    os.close(reader)


def test_a_fifo_without_a_reader_is_an_error_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(OSError, match="no process reads from it"):
        write_text(tmp_path / "fifo", "text")

    assert (tmp_path / "fifo").is_fifo()


def test_a_character_device_is_written_in_place_also_through_a_link(tmp_path: Path) -> None:
    master, terminal = os.openpty()
    (tmp_path / "link").symlink_to(os.ttyname(terminal))

    write_text(tmp_path / "link", "shown")

    assert os.read(master, 100) == b"shown"
    assert Path(os.ttyname(terminal)).is_char_device()
    os.close(terminal)
    os.close(master)


def test_a_folder_and_a_socket_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)  # the name of a socket is a short one
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")

    for private in (False, True):
        for name, says in (("folder", "Is a directory"), ("socket", "no regular file")):
            with pytest.raises(OSError, match=says) as refused:
                write({tmp_path / name: b"text"}, private=private)
            assert refused.value.filename == str(tmp_path / name)
    assert (tmp_path / "socket").is_socket()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "socket"]


def test_of_several_none_is_written_where_one_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")

    with pytest.raises(IsADirectoryError):
        write({tmp_path / "file": b"new", tmp_path / "folder": b"new"})

    assert (tmp_path / "file").read_text() == "old"


def test_an_open_descriptor_is_written_on_from_where_it_is(tmp_path: Path) -> None:
    """`--audit /dev/stdout` with output sent to a file: the file is the log of a run, and must not be lost."""
    code = "\n".join(
        [
            "from pathlib import Path",
            "from megacpp_overlays.files import write_text",
            "print('before', flush=True)",
            "write_text(Path('/dev/stdout'), 'between\\n')",
            "print('after', flush=True)",
        ]
    )
    log = tmp_path / "log"
    with log.open("w") as stdout:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, check=True)
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert log.read_text() == "before\nbetween\nafter\n"
    assert piped.stdout == b"before\nbetween\nafter\n"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like `/tmp`, in which another user made links to a file and to a folder of this user."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "audit.json").write_text("precious")
    (folder / "file").symlink_to(tmp_path / "private" / "audit.json")
    (folder / "folder").symlink_to(tmp_path / "private")
    if os.geteuid() == 0:
        for link in folder.iterdir():
            os.lchown(link, 65534, 65534)
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    yield folder
    assert (tmp_path / "private" / "audit.json").read_text() == "precious"


@pytest.mark.parametrize("name", ["file", "folder/audit.json", "folder/../private/audit.json", "folder/new.json"])
def test_a_link_of_another_user_is_not_followed_where_everybody_can_make_one(shared: Path, name: str) -> None:
    with pytest.raises(
        PermissionError, match=r"a link of user \d+ in a folder that everybody may write into"
    ) as refused:
        write_text(shared / name, "new")
    with pytest.raises(SettingsError, match="cannot be written: it is a link of user"):
        Log(Settings(log=LogForm.FILE, log_path=str(shared / name)))

    assert refused.value.filename == str(shared / name.partition("/")[0])


def test_a_link_of_another_user_is_followed_in_a_folder_that_is_not_everybodys(shared: Path, tmp_path: Path) -> None:
    shared.chmod(0o755)

    write_text(shared / "folder" / "other.json", "new")

    assert (tmp_path / "private" / "other.json").read_text() == "new"


def test_a_private_file_takes_the_place_of_a_link(shared: Path) -> None:
    write({shared / "file": b"new"}, private=True)

    assert not (shared / "file").is_symlink()
    assert (shared / "file").read_bytes() == b"new"


def test_own_links_are_followed_anywhere_and_a_circle_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("./c/../file")
    (tmp_path / "c").symlink_to("a")

    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_text(tmp_path / "a", "new")
    (tmp_path / "c").unlink()
    (tmp_path / "c").mkdir()
    write_text(tmp_path / "a", "new")

    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "a").is_symlink()


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


def test_a_file_that_is_not_regular_or_too_large_is_not_read(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("size", [0, 1, files._PIECE - 1, files._PIECE, 2 * files._PIECE + 3])
def test_a_file_is_read_up_to_the_limit_and_no_byte_further(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(content := os.urandom(size))

    assert read(path, size) == read(path, size + 1) == content
    with pytest.raises(OSError, match=f"it is larger than {size - 1} bytes"):
        read(path, size - 1)


def test_a_file_of_the_kernel_that_says_no_length_is_read() -> None:
    assert read(Path("/proc/self/stat")).startswith(str(os.getpid()).encode())
    with pytest.raises(OSError, match="it is larger than 3 bytes"):
        read(Path("/proc/self/stat"), 3)


def test_a_small_file_takes_little_memory_under_any_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"small")
    tracemalloc.start()
    try:
        assert read(path, 1 << 30) == b"small"
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 4 << 20
