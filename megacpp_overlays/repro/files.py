"""Files written whole: a reader sees the old text or the new one, never half of one, also after a crash."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a text in one step, as UTF-8; a link stays one, and its target is written.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with draft.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
