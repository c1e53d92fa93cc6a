"""`scripts/wheels.py fetch --sources`: source archives from an index, each checked against its hash before it is there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_server import NAME, PACKAGE, Index, sdist, serving, wheel
from places import ROOT

ARCHIVE = f"{PACKAGE}-1.0.tar.gz"


@pytest.fixture
def index() -> Iterator[Index]:
    with serving() as found:
        yield found


def fetch(index: Index, folder: Path, sha256: str) -> subprocess.CompletedProcess[str]:
    (folder / "list.txt").write_text(f"# made up\n{NAME}==1.0 --hash=sha256:{sha256}\n")
    command = [sys.executable, ROOT / "scripts/wheels.py", "fetch", "--sources", folder / "list.txt", folder / "into"]
    env = {**os.environ, "PIP_INDEX_URL": index.endpoint, "UV_INDEX_URL": "", "UV_DEFAULT_INDEX": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_an_archive_is_fetched_once_although_the_release_has_a_wheel(index: Index, tmp_path: Path) -> None:
    content = sdist(f"{PACKAGE}-1.0", {"test/test_it.py": ""})
    index.publish(f"{PACKAGE}-1.0-py3-none-any.whl", wheel({}))
    sha256 = index.publish(ARCHIVE, content)

    first = fetch(index, tmp_path, sha256)
    asked = len(index.asked)
    again = fetch(index, tmp_path, sha256)

    assert (first.returncode, again.returncode) == (0, 0), first.stdout + first.stderr
    assert [path.name for path in (tmp_path / "into").iterdir()] == [ARCHIVE]
    assert (tmp_path / "into" / ARCHIVE).read_bytes() == content
    assert "1 of 1 source archives are there" in again.stdout
    assert len(index.asked) == asked


def test_an_archive_that_was_damaged_is_fetched_again(index: Index, tmp_path: Path) -> None:
    content = sdist(f"{PACKAGE}-1.0", {"test/test_it.py": ""})
    sha256 = index.publish(ARCHIVE, content)
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / ARCHIVE).write_bytes(content[:-1])

    done = fetch(index, tmp_path, sha256)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "into" / ARCHIVE).read_bytes() == content


@pytest.mark.parametrize("wrong", ["the list", "the answer"])
def test_an_archive_that_is_not_the_one_that_is_listed_is_not_taken(index: Index, tmp_path: Path, wrong: str) -> None:
    sha256 = index.publish(ARCHIVE, sdist(f"{PACKAGE}-1.0", {"test/test_it.py": ""}))
    if wrong == "the answer":
        index.served[ARCHIVE] = b"something else"

    done = fetch(index, tmp_path, "0" * 64 if wrong == "the list" else sha256)

    assert done.returncode == 1
    assert ("FAILED\nthe index has no file with this hash" if wrong == "the list" else "FAILED") in done.stdout
    assert list((tmp_path / "into").iterdir()) == []
