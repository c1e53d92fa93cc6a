"""Regular expressions over third-party texts: their time is linear in the length of the text."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_overlays.repro import manifest
from megacpp_overlays.repro.inventory import Pack
from megacpp_overlays.repro.manifest import ManifestError
from megacpp_overlays.repro.transcript import without_paths

LONGEST = 20
"""Seconds of this process, not of a clock. In proportion it takes a tenth of one; otherwise minutes."""


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Raise TimeoutError in an expression that takes longer."""

    def end(*_: object) -> None:
        raise TimeoutError(f"this takes more than {LONGEST} seconds of CPU time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("text", ["\x1b]" * 80_000, "\x1b[" * 80_000], ids=["titles", "colours"])
def test_a_transcript_is_freed_of_escape_sequences(text: str) -> None:
    assert without_paths(f"{text}\x1b[31mred\x1b[0m\x1b]0;title\x07").endswith("red")


def test_notes_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "09-made-up"
    folder.mkdir()
    (folder / "README.md").write_text("# Pack 09: made up\n" + "\n" * 80_000)
    with pytest.raises(ManifestError, match="does not say its class, state"):
        manifest.derive(Pack(folder, 9, "made-up"), (), None)

    (folder / "README.md").write_text("# Pack 09: made up\n\n- **Class:** overlay\n\n## Lifecycle state\n\ndraft\n")
    entry = manifest.derive(Pack(folder, 9, "made-up"), (), None)

    assert (entry["title"], entry["class"], entry["state"]) == ("made up", "overlay", "draft")
