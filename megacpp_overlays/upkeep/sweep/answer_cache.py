"""Answers of a host, kept by address with their ETag, so that asking again is cheap."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacpp_overlays import json_text
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.files import write_text


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One kept answer."""

    url: str
    etag: str | None
    next: str | None
    """Address of the next page of a list."""
    body: Any


class AnswerCache:
    """A folder with one file for each address; made when the first answer is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, url: str) -> CacheEntry | None:
        """Return what is kept for an address; a damaged file is as good as none."""
        try:
            kept = CacheEntry(**json_text.parse(self._path(url).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return kept if kept.url == url else None

    def keep(self, kept: CacheEntry) -> None:
        """Keep an answer, in one step.

        Raises:
            UpkeepError: the folder or a file in it cannot be written.
        """
        path = self._path(kept.url)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asdict(kept)))
        except OSError as error:
            raise UpkeepError(f"{self._folder}: answers cannot be kept here: {error.strerror}; see --cache") from error

    def _path(self, url: str) -> Path:
        return self._folder / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
