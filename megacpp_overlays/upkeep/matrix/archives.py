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
    """Return where archives are kept: MEGACPP_RELEASES_CACHE, else below XDG_CACHE_HOME, else below ~/.cache."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    return files.cache_folder() / "releases"


class Archives:
    """Released files on this machine, fetched where there is an index."""

    def __init__(
        self,
        folder: Path,
        others: Sequence[Path] = (),
        index: PackageIndex | None = None,
        findings: FindingCache | None = None,
    ) -> None:
        """Prepare the cache.

        Args:
            folder: where fetched files are kept; made when the first one is.
            others: folders that are only read, such as one of downloaded wheels.
            index: where missing and damaged files come from; None asks nobody.
            findings: what probes found in such files before; None keeps nothing beyond this object.
        """
        self._folder = folder
        self._others = tuple(others)
        self._index = index
        self.findings = findings or FindingCache()

    def get(self, file: ArchiveFile) -> Path | None:
        """Return the path of a file, fetched when it is missing or damaged; None where there is nobody to ask.

        Raises:
            UpkeepError: it cannot be fetched, or what came is another file.
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
        with tempfile.TemporaryDirectory(prefix=".", dir=self._folder) as name:  # nobody else can put a link into it
            draft = Path(name, file.name)
            self._index.download(file, draft)
            draft.replace(path)  # complete or not at all, whoever else fetches it
        return path


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with files.open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
