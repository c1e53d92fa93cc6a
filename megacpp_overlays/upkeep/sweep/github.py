"""A polite client of the REST API of GitHub or of a GitHub Enterprise server.

It makes one request at a time, as the host asks of its clients. When the hourly budget of requests is spent, the client stops
and reports when it is renewed; it does not sleep. A token is sent only to the configured host: redirects to other hosts are
not followed, and requests to this machine use no proxy.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import Retry
from urllib3.exceptions import NewConnectionError

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.bounded_http import BoundedAdapter
from megacpp_overlays.upkeep.sweep.host_errors import (
    GoneError,
    NoAnswerError,
    RateLimitError,
    TokenRefusedError,
    UnreachableError,
)
from megacpp_overlays.version import VERSION

DEFAULT = "https://api.github.com"
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_LONGEST = timedelta(days=7)
_REDIRECTS, _HOPS = {301, 302, 307, 308}, 5
_BROKEN, _TRIES = {500, 502, 503, 504}, 3
"""Status codes of requests that are retried, and the number of retries."""


def checked_address(text: str) -> str:
    """Return the address of an API without its last slash.

    Raises:
        UpkeepError: the text is no http or https address, or it contains a user name or a password.
    """
    if "@" in text:
        raise UpkeepError("the address of the API has credentials in it; leave them out and set GITHUB_TOKEN instead")
    try:
        parts = urlsplit(text)
        fits = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # half of an IPv6 address, or a port that is no number
        fits = False
    # A query may contain a token, so it is not shown.
    shown, *rest = re.split("[?#]", text)
    if not fits or rest:
        raise UpkeepError(
            f"{shown!r}{' with a query' if rest else ''} is no address of an API; it looks like {DEFAULT}"
        )
    return text.rstrip("/")


class Client:
    """A client of one host, which tracks the host's budget of requests.

    Args:
        api: base address, such as `https://api.github.com` or `https://ghe.example/api/v3`.
        token: sent only to that host, never printed or stored; white space around it is removed.
        timeout: seconds to connect, and to wait for an answer.
        backoff: seconds before the second retry of a request that failed in transit or with 5xx; doubled each time.

    Raises:
        UpkeepError: the address is invalid, or the token would be sent unencrypted.
    """

    def __init__(
        self,
        api: str,
        token: str | None,
        *,
        timeout: tuple[float, float] = (5.0, 20.0),
        backoff: float = 0.5,
    ) -> None:
        self.api = checked_address(api)
        token = (token or "").strip()
        if not (token.isascii() and token.isprintable()):
            raise UpkeepError(
                "the token in GITHUB_TOKEN or GH_TOKEN has characters that no token has; it is not shown here"
            )
        parts = urlsplit(self.api)
        if token and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise UpkeepError(f"{self.api} is not encrypted, so the token stays here; use https, or unset the token")
        # A proxy of the environment would see the token, and cannot reach this machine's loopback.
        self._proxies = {"no_proxy": str(parts.hostname)} if parts.hostname in _LOOPBACK else {}
        self._timeout = timeout
        self._session = requests.Session()
        self._session.headers.update(
            {
                "Accept": "application/vnd.github+json",
                "User-Agent": f"megacpp-overlays/{VERSION}",
                "X-GitHub-Api-Version": "2022-11-28",
            }
        )
        self._session.auth = _authorization(token)
        # When the host asks to wait, the client stops and does not sleep here. urllib3 must not retry by status, because it
        # would first read the body of the response to its end, which may never come.
        retry = Retry(
            total=3,
            connect=1,
            read=2,
            backoff_factor=backoff,
            status=0,
            status_forcelist=(),
            allowed_methods=("GET",),
            respect_retry_after_header=False,
            raise_on_status=False,
        )
        self._backoff = backoff
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, BoundedAdapter(max_retries=retry))
        self.asked = 0
        """Number of requests, without retries."""
        self.left: int | None = None
        """Remaining requests by the host's last answer."""
        self._closed_until: datetime | None = None

    def get(self, path: str) -> dict[str, Any]:
        """Return the object at a path below the address of the API.

        Raises:
            HostError: see its subclasses.
        """
        found = self._ask(self.api + path)[0]
        if not isinstance(found, dict):
            raise NoAnswerError(f"{self.api + path}: the answer is no object")
        return found

    def pages(self, path: str) -> Iterator[list[Any]]:
        """Yield the pages of a list, each requested when the caller needs it.

        Raises:
            HostError: see its subclasses.
        """
        url: str | None = self.api + path
        while url:
            page, url = self._ask(url)
            if not isinstance(page, list):
                raise NoAnswerError(f"{self.api + path}: the answer is no list")
            yield page

    def _ask(self, url: str) -> tuple[Any, str | None]:
        """Return the answer and, for a list, the address of its next page."""
        for _ in range(_HOPS):
            response = self._send(url)
            if response.status_code in _REDIRECTS and "Location" in response.headers:
                url = self._follow(url, response.headers["Location"])
                continue
            self._raise_for(response, url)
            return self._read(url, response)
        raise NoAnswerError(f"{url}: more than {_HOPS} redirects")

    def _send(self, url: str) -> requests.Response:
        if self._closed_until and datetime.now(timezone.utc) < self._closed_until:
            raise RateLimitError(self._closed_until)
        self.asked += 1
        try:
            response = self._get(url)
        except requests.RequestException as error:
            cause = getattr(error.args[0], "reason", None) if error.args else None
            no_way = (requests.ConnectTimeout, requests.exceptions.ProxyError, requests.exceptions.SSLError)
            if isinstance(error, no_way) or isinstance(cause, NewConnectionError):
                raise UnreachableError(f"{urlsplit(url).netloc} cannot be reached: {cause or error}") from error
            raise NoAnswerError(f"{url}: no whole answer: {cause or error}") from error
        except ValueError as error:
            raise NoAnswerError(f"{url}: leads to an invalid address") from error
        self._note_budget(response)
        return response

    def _get(self, url: str) -> requests.Response:
        for tried in itertools.count():
            response = self._session.get(url, timeout=self._timeout, allow_redirects=False, proxies=self._proxies)
            if response.status_code not in _BROKEN or tried == _TRIES:
                break
            time.sleep(self._backoff * 2 ** (tried - 1) if tried else 0)
        return response

    def _note_budget(self, response: requests.Response) -> None:
        left, reset = response.headers.get("X-RateLimit-Remaining", ""), response.headers.get("X-RateLimit-Reset", "")
        if (number := _number(left)) is not None:
            self.left = number
            self._closed_until = None if (when := _number(reset)) is None else _at(when)
            if self.left:
                self._closed_until = None

    def _follow(self, url: str, location: str) -> str:
        try:
            target = urljoin(url, location)
            here, there = urlsplit(url), urlsplit(target)
        except ValueError as error:
            raise NoAnswerError(f"{url}: leads to an invalid address") from error
        if (here.scheme, here.netloc) != (there.scheme, there.netloc):
            raise NoAnswerError(f"{url}: leads to another host, {there.netloc}; that is not followed")
        return target

    def _raise_for(self, response: requests.Response, url: str) -> None:
        match response.status_code:
            case 200:
                return
            case 401:
                raise TokenRefusedError(f"{urlsplit(url).netloc} does not take the token in GITHUB_TOKEN or GH_TOKEN")
            case 404 | 410 | 451:
                raise GoneError(f"{url}: not there ({response.status_code}), or not shown to everybody")
            case 403 | 429 if _limited(response):
                self._closed_until = _resume(response)
                raise RateLimitError(self._closed_until)
            case status:
                raise NoAnswerError(f"{url}: the host answered {status} {response.reason}".rstrip())

    def _read(self, url: str, response: requests.Response) -> tuple[Any, str | None]:
        try:
            data = response.json()
        except (ValueError, RecursionError) as error:
            raise NoAnswerError(f"{url}: the answer is not the JSON that it should be") from error
        following = response.links.get("next", {}).get("url")
        return data, self._follow(url, following) if following else None


def _authorization(token: str | None) -> Callable[[requests.PreparedRequest], requests.PreparedRequest]:
    # Always set, also without a token: otherwise requests sends credentials from a netrc file.
    def add(request: requests.PreparedRequest) -> requests.PreparedRequest:
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        return request

    return add


def _limited(response: requests.Response) -> bool:
    spent = response.headers.get("X-RateLimit-Remaining") == "0" or "Retry-After" in response.headers
    return spent or response.status_code == requests.codes.too_many_requests or "rate limit" in response.text.lower()


def _resume(response: requests.Response) -> datetime:
    """Return the time of the next allowed request by the host's rules: Retry-After, else the reset of the budget, else in a minute."""
    now = datetime.now(timezone.utc)
    wait, reset = response.headers.get("Retry-After", ""), response.headers.get("X-RateLimit-Reset", "")
    if (seconds := _number(wait)) is not None:
        return _at(now.timestamp() + seconds)
    if response.headers.get("X-RateLimit-Remaining") == "0" and (when := _number(reset)) is not None:
        return _at(when)
    return now + timedelta(minutes=1)


def _number(text: str) -> int | None:
    """Return the number in a header; None where it is no number of at most 15 digits."""
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None


def _at(seconds: float) -> datetime:
    """Return a time given in seconds since 1970, limited to a week from now, because no user waits longer."""
    latest = datetime.now(timezone.utc) + _LONGEST
    return min(datetime.fromtimestamp(min(seconds, latest.timestamp()), timezone.utc), latest)
