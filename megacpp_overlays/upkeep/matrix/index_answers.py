"""Answers of a package index, with a cache of its earlier answers; offline queries need no HTTP library."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from megacpp_overlays import json_text
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.files import write_text
from megacpp_overlays.upkeep.matrix.releases import IndexAnswer, from_data, to_data

if TYPE_CHECKING:
    from megacpp_overlays.upkeep.matrix.package_index import PackageIndex

VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_PYPI = "https://pypi.org/simple/"


class NoNetworkError(UpkeepError):
    """Raised when the index cannot be reached, or offline mode forbids the query."""


def configured(env: Mapping[str, str] = os.environ) -> str:
    """Return the address of the index that the environment configures; do not print it, because it may hold a password."""
    for name in VARIABLES:
        if value := env.get(name, "").strip():
            named, _, address = value.partition("=")  # uv: NAME=URL
            return address if address and "/" not in named else value
    return _PYPI


class IndexAnswers:
    """The answers of an index, with the last cached answer where the index does not reply."""

    def __init__(self, folder: Path, *, offline: bool, tell: Callable[[str], None]) -> None:
        """Open the cache and, unless offline, the client of the index.

        Args:
            folder: the folder of cached answers.
            offline: whether to use cached answers only.
            tell: receives one sentence for the user when an old answer is used.
        """
        endpoint = configured()
        parts = urlsplit(endpoint)
        place = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._folder = folder / hashlib.sha256(place.encode()).hexdigest()[:12]
        self._tell = tell
        self.index = None if offline else _index(endpoint)

    def __enter__(self) -> IndexAnswers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.index is not None:
            self.index.close()

    def get(self, distribution: str) -> IndexAnswer:
        """Return the answer of today, or the last one.

        Raises:
            NoNetworkError: there is no answer, and none is cached.
            UpkeepError: the answer lists no release.
        """
        answer = self._get(distribution)
        if not answer.releases:
            raise UpkeepError(f"{distribution}: the configured index has no release of it")
        return answer

    def _get(self, distribution: str) -> IndexAnswer:
        path = self._folder / f"{distribution}.json"
        if self.index is not None:
            try:
                answer = self.index.ask(distribution)
            except NoNetworkError as error:
                reason = str(error)
            else:
                try:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    write_text(path, json.dumps(to_data(answer)))
                except OSError as error:
                    said = f"{self._folder}: answers cannot be kept here: {error.strerror}; see --cache"
                    raise UpkeepError(said) from error
                return answer
        else:
            reason = "offline"
        try:
            answer = from_data(json_text.parse(path.read_text()))
        except (OSError, ValueError, UpkeepError) as error:
            raise NoNetworkError(f"{distribution}: {reason}, and no answer of the index is in the cache") from error
        if self.index is not None:
            self._tell(f"{reason}: its answer about {distribution} of {answer.asked} is used")
        return answer


def today() -> str:
    """Return the date in UTC."""
    return datetime.now(timezone.utc).date().isoformat()


def _index(endpoint: str) -> PackageIndex:
    from megacpp_overlays.upkeep.matrix.package_index import PackageIndex  # noqa: PLC0415 - it needs an HTTP library

    return PackageIndex(endpoint)
