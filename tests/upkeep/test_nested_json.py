"""Files of JSON that are nested 100,000 levels deep: every reader refuses its own in one sentence, and none in a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.repro import manifest
from megacpp_overlays.upkeep.drift import installations
from megacpp_overlays.upkeep.matrix import index_answers, matrix_file
from megacpp_overlays.upkeep.sweep import threads

NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (manifest.read, manifest.NAME),
        (matrix_file.read, matrix_file.NAME),
        (threads.read, threads.NAME),
    ],
    ids=["manifest", "matrix", "answers about threads"],
)
def test_a_file_of_a_folder_of_packs_is_refused(tmp_path: Path, read: Callable[[Path], Any], name: str) -> None:
    (tmp_path / name).write_text(NESTED)

    with pytest.raises(OverlayError, match="nested more than 100 levels deep"):
        read(tmp_path)


def test_a_kept_answer_of_an_index_that_is_such_a_file_counts_as_none(tmp_path: Path) -> None:
    with index_answers.IndexAnswers(tmp_path, offline=True, tell=lambda _: None) as answers:
        answers._folder.mkdir()
        (answers._folder / "liger-kernel.json").write_text(NESTED)
        with pytest.raises(index_answers.NoNetworkError, match="no answer of the index is in the cache"):
            answers.get("liger-kernel")


def test_an_installation_whose_origin_is_such_a_file_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "nested-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nested\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(NESTED)

    with pytest.raises(OverlayError, match="nested more than 100 levels deep"):
        installations.find_all([str(tmp_path)])
