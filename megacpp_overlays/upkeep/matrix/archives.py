"""A cache of released archives. A file counts only when it has the SHA-256 that the index lists."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megacpp_overlays import files
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.finding_cache import FindingCache
from megacpp_overlays.upkeep.matrix.releases import ArchiveFile

if TYPE_CHECKING:
    from megacpp_overlays.upkeep.matrix.package_index import PackageIndex

_CHUNK = 1 << 20
VARIABLE = "MEGACPP_RELEASES_CACHE"


def default_folder() -> Path:
    """Return the folder of kept archives: MEGACPP_RELEASES_CACHE, else below XDG_CACHE_HOME, else below ~/.cache."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    return files.cache_folder() / "releases"


class Archives:
    """Released files on this machine; missing files are fetched if there is an index."""

    def __init__(
        self,
        folder: Path,
        others: Sequence[Path] = (),
        index: PackageIndex | None = None,
        findings: FindingCache | None = None,
    ) -> None:
        """Prepare the cache.

        Args:
            folder: the folder for fetched files; created with the first file.
            others: folders that are only read, such as one of downloaded wheels.
            index: the source of missing and damaged files; None fetches nothing.
            findings: the cache of earlier findings of probes in such files; None uses a cache that lives as long as this object.
        """
        self._folder = folder
        self._others = tuple(others)
        self._index = index
        self.findings = findings or FindingCache()

    def get(self, file: ArchiveFile) -> Path | None:
        """Return the path of a file, fetched if it is missing or damaged; None where there is no index to fetch it from.

        Raises:
            UpkeepError: the file cannot be fetched, or the fetched file has another SHA-256.
        """
        for folder in (self._folder, *self._others):
            path = folder / file.name
            if path.is_file() and _sha256(path) == file.sha256:
                return path
        if self._index is None:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UpkeepError(f"{self._folder}: releases cannot be kept here: {error.strerror}; see --cache") from error
        path = self._folder / file.name
        with tempfile.TemporaryDirectory(prefix=".", dir=self._folder) as name:  # no other user can put a link into it
            draft = Path(name, file.name)
            self._index.download(file, draft)
            draft.replace(path)  # atomic, so that concurrent fetches are safe
        return path


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with files.open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
