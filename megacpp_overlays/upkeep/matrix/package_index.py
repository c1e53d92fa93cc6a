"""A client of a package index that lists releases; `index_answers` caches its earlier answers.

The index is the one that pip or uv would ask: UV_DEFAULT_INDEX, UV_INDEX_URL or PIP_INDEX_URL, else PyPI. The simple
API lists the files, their hashes and which of them were yanked (PEP 503, 592 and 691). Dates are in its JSON form
(PEP 700). Where an index answers in HTML only, they come from the project JSON next to the simple API, `/pypi/NAME/json`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import requests
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage, NoSuchProjectError, PyPISimple
from pypi_simple.errors import DigestMismatchError, UnsupportedContentTypeError, UnsupportedRepoVersionError

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.bounded_http import BodyError, BoundedAdapter
from megacpp_overlays.upkeep.matrix.index_answers import NoNetworkError, today
from megacpp_overlays.upkeep.matrix.releases import (
    ArchiveFile,
    IndexAnswer,
    Release,
    in_order,
    is_plain,
    release,
)

_TIMEOUT = (10.0, 60.0)
"""Seconds to connect and to wait for bytes."""
_WRONG_TYPES = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""Exceptions that the code raises on JSON values of unexpected types."""
_KINDS = (".whl", ".tar.gz")


class PackageIndex:
    """The client of the index."""

    def __init__(self, endpoint: str) -> None:
        self._client = PyPISimple(endpoint)
        for scheme in ("http://", "https://"):
            self._client.s.mount(scheme, BoundedAdapter())
        self._packages: dict[str, DistributionPackage] = {}

    def close(self) -> None:
        """Close the connections."""
        self._client.s.close()

    def ask(self, distribution: str) -> IndexAnswer:
        """Return every release of a distribution.

        Raises:
            NoNetworkError: there is no answer.
            UpkeepError: the index has no such project, or its answer cannot be read.
        """
        try:
            page = self._client.get_project_page(distribution, timeout=_TIMEOUT)
            packages = [each for each in page.packages if _is_readable(each)]
            self._packages |= {each.digests["sha256"]: each for each in packages}
            dates = {each.filename: _date(each.upload_time) for each in packages if each.upload_time}
            if len(dates) < len(packages):
                dates = self._project_json(distribution) | dates
            return IndexAnswer(distribution=distribution, asked=today(), releases=_releases(page.packages, dates))
        except NoSuchProjectError as error:
            raise UpkeepError(f"{distribution}: the configured index has no such project") from error
        except (requests.ConnectionError, requests.Timeout) as error:
            raise NoNetworkError(f"the configured index does not answer ({type(error).__name__})") from error
        except requests.HTTPError as error:
            raise NoNetworkError(f"the configured index answers with an error ({_status(error)})") from error
        except BodyError as error:
            raise UpkeepError(f"{distribution}: the answer of the configured index cannot be read: {error}") from error
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError, requests.RequestException) as error:
            raise UpkeepError(f"the answer of the configured index cannot be read: {type(error).__name__}") from error
        except _WRONG_TYPES as error:
            said = f"{distribution}: the answer of the configured index cannot be read: {type(error).__name__}"
            raise UpkeepError(said) from error

    def download(self, file: ArchiveFile, path: Path) -> None:
        """Write a file of an answer to a path, its hash checked; nothing is left there on any failure.

        Raises:
            NoNetworkError: the file cannot be downloaded.
            UpkeepError: the downloaded file does not have the SHA-256 that the index lists.
        """
        if (package := self._packages.get(file.sha256)) is None:
            raise NoNetworkError(f"{file.name} is not in the cache, and the configured index does not offer it")
        try:
            self._client.download_package(package, path, timeout=_TIMEOUT)
        except DigestMismatchError as error:
            raise UpkeepError(f"{file.name}: the download does not have the SHA-256 that the index lists") from error
        except BodyError as error:
            raise UpkeepError(f"{file.name} cannot be downloaded: {error}") from error
        except requests.RequestException as error:
            raise NoNetworkError(f"{file.name} cannot be downloaded ({_status(error)})") from error

    def _project_json(self, distribution: str) -> dict[str, str]:
        """Return upload dates by file name from the project JSON next to the simple API, where there is one."""
        parts = urlsplit(self._client.endpoint)
        path = parts.path.rstrip("/")
        if not path.endswith("/simple"):
            return {}
        address = urlunsplit(parts._replace(path=f"{path.removesuffix('/simple')}/pypi/{distribution}/json"))
        dates: dict[str, str] = {}
        with contextlib.suppress(requests.RequestException, *_WRONG_TYPES):
            answer = self._client.s.get(address, timeout=_TIMEOUT)
            answer.raise_for_status()
            for files in answer.json()["releases"].values():
                for each in files:
                    dates[each["filename"]] = _date(datetime.fromisoformat(each["upload_time"]))
        return dates


def _is_readable(package: DistributionPackage) -> bool:
    """Return whether a file has a readable format and a SHA-256 to check it by."""
    name = package.filename
    return name.endswith(_KINDS) and is_plain(name) and "sha256" in package.digests


def _releases(packages: Sequence[DistributionPackage], dates: Mapping[str, str]) -> tuple[Release, ...]:
    """Return a release for every version, also for a version without readable files."""
    by_version: defaultdict[str, list[DistributionPackage]] = defaultdict(list)
    for each in packages:
        with contextlib.suppress(InvalidVersion, TypeError):  # no version, or one from before PEP 440
            by_version[str(Version(each.version or ""))].append(each)
    return in_order(
        release(
            version,
            [
                ArchiveFile(name=each.filename, sha256=each.digests["sha256"], uploaded=dates.get(each.filename))
                for each in of_it
                if _is_readable(each)
            ],
            next((each.yanked_reason or "" for each in of_it), "") if all(each.is_yanked for each in of_it) else None,
        )
        for version, of_it in by_version.items()
    )


def _date(time: datetime) -> str:
    return (time if time.tzinfo is None else time.astimezone(timezone.utc)).date().isoformat()


def _status(error: requests.RequestException) -> str:
    return f"HTTP {error.response.status_code}" if error.response is not None else type(error).__name__
