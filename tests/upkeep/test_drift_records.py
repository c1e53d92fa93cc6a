"""RECORD: each line is parsed as it was written, and each change of an installed file is detected."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from drift_environments import digest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.drift import records
from megacpp_overlays.upkeep.drift.records import CannotCheckError, Kind, RecordEntry

# File names. `parse` removes a leading `./`, so a path with a part `.` may not come back as it was written.
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n/"), min_size=1).filter(
    lambda name: name not in {".", ".."}
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
in_tmp_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)


def entry(file: str = "a/b.py", text: str = "x = 1\n", algorithm: str = "sha256", **changes: object) -> RecordEntry:
    fields = {"file": file, "algorithm": algorithm, "digest": digest(text, algorithm), "size": len(text.encode())}
    return RecordEntry(**{**fields, **changes})  # type: ignore[arg-type]


@given(st.lists(st.tuples(PATHS, st.binary(max_size=64), st.booleans()), max_size=8))
def test_lines_of_installers_are_parsed_as_they_were_written(rows: list[tuple[str, bytes, bool]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for path, content, hashed in rows:
        writer.writerow((path, f"sha256={digest(content)}" if hashed else "", len(content) if hashed else ""))

    found = records.parse(text.getvalue())

    assert [each.file for each in found] == [path for path, _, _ in rows]
    assert [each.size for each in found] == [len(content) if hashed else None for _, content, hashed in rows]
    assert [each.digest for each in found] == [digest(content) if hashed else "" for _, content, hashed in rows]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.py,sha256=abc\n", "line 1: a line is a path, a hash and a size"),
        ("a.py,,\n,sha256=abc,3\n", "line 2"),
        ("a.py,sha256,3\n", "'sha256', '3' is no hash and size"),
        ("a.py,sha256=abc,three\n", "'three' is no hash and size"),
        ('a.py,"sha256=abc', "is a path, a hash and a size"),
        ("x" * 200_000 + ",,\n", "RECORD cannot be read"),
    ],
)
def test_a_malformed_record_is_refused(text: str, says: str) -> None:
    with pytest.raises(UpkeepError, match=says):
        records.parse(text)


def test_padding_an_upper_case_algorithm_and_a_leading_dot_are_normalised() -> None:
    found = records.parse("./a.py,SHA256=abc==,3\n\n")

    assert found == (RecordEntry(file="a.py", algorithm="sha256", digest="abc", size=3),)


@in_tmp_path
@given(content=st.binary(max_size=200), algorithm=st.sampled_from(sorted(records.ALGORITHMS)))
def test_a_file_as_it_was_published_has_no_difference(tmp_path: Path, content: bytes, algorithm: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    line = records.parse(f"file,{algorithm}={digest(content, algorithm)},{len(content)}\n")[0]

    assert records.difference(line, path) is None
    assert records.difference(line, path, quick=True) is None


@in_tmp_path
@given(content=st.binary(min_size=1, max_size=200), at=st.integers(0), other=st.integers(1, 255), sized=st.booleans())
def test_a_changed_byte_is_detected_unless_only_sizes_are_compared(
    tmp_path: Path, content: bytes, at: int, other: int, sized: bool
) -> None:
    path = tmp_path / "file"
    changed = bytearray(content)
    changed[at % len(content)] ^= other
    path.write_bytes(bytes(changed))
    line = entry(digest=digest(content), size=len(content) if sized else None)

    assert records.difference(line, path) is Kind.CHANGED
    assert records.difference(line, path, quick=True) is (None if sized else Kind.CHANGED)


def test_another_size_is_detected_without_reading_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x = 1\n")

    assert records.difference(entry(size=7), tmp_path / "file", quick=True) is Kind.CHANGED


def test_a_deleted_file_and_a_folder_in_its_place_are_missing(tmp_path: Path) -> None:
    assert records.difference(entry(), tmp_path / "gone") is Kind.MISSING
    assert records.difference(entry(), tmp_path) is Kind.MISSING


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (entry(algorithm="md5"), "a/b.py has a hash of md5"),
        (entry(algorithm="sha1"), "a/b.py has a hash of sha1"),
        (RecordEntry(file="a/b.py", algorithm="", digest="", size=None), "a/b.py has no hash"),
        (entry(digest="not base64!"), "a/b.py has a hash that is no base64"),
    ],
)
def test_a_line_without_a_valid_hash_cannot_be_checked(tmp_path: Path, line: RecordEntry, says: str) -> None:
    (tmp_path / "file").write_text("x = 1\n")

    with pytest.raises(CannotCheckError, match=says):
        records.difference(line, tmp_path / "file")


def test_a_file_that_cannot_be_read_cannot_be_checked(tmp_path: Path) -> None:
    unreadable = tmp_path / ("x" * 300)  # longer than a file system allows

    with pytest.raises(CannotCheckError, match=r"a/b\.py cannot be read: File name too long"):
        records.difference(entry(), unreadable)


@pytest.mark.parametrize(
    ("file", "may"),
    [
        ("a-1.0.dist-info/RECORD", True),
        ("a-1.0.dist-info/RECORD.jws", True),
        ("a/__pycache__/b.cpython-312.pyc", True),
        ("a/RECORD", False),
        ("a/b.py", False),
        ("a-1.0.dist-info/METADATA", False),
    ],
)
def test_only_record_its_signatures_and_bytecode_may_lack_a_hash(file: str, may: bool) -> None:
    assert entry(file=file).may_lack_hash is may
