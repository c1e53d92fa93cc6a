"""Answers over HTTP that end: no body is read past the length that one of its kind has.

A body counts as it is unpacked. Of what a host may pack it with, gzip and deflate alone are taken, one at a time: they
unpack a thousandfold at the most, so a small piece of a body never becomes a large one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from megacpp_overlays import files

LARGEST_ANSWER = files.LARGEST
"""Bytes of a body that is read as a whole."""
LARGEST_DOWNLOAD = 4 << 30
"""Bytes of a body that goes into a file as it comes: a wheel may have compiled kernels in it."""
_PACKED = ("gzip", "deflate")
_CHUNK = 1 << 14


class BodyError(requests.RequestException):
    """Raised for a body that is too long, or packed in a way that nobody asked for."""


class BoundedAdapter(HTTPAdapter):
    """An adapter of `requests` whose responses raise where their body does not end."""

    def add_headers(self, request: requests.PreparedRequest, **_: Any) -> None:
        """Ask for what can be unpacked piece by piece."""
        request.headers["Accept-Encoding"] = ", ".join(_PACKED)

    def send(self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **options: Any) -> Any:
        """Send a request; see `requests.adapters.HTTPAdapter.send`.

        Raises:
            BodyError: the body is packed in another way. One that is too long raises it when it is read.
        """
        response = super().send(request, stream, *args, **options)
        packed = response.headers.get("Content-Encoding", "").strip().lower()
        if packed not in ("", "identity", *_PACKED):
            response.close()
            raise BodyError(f"the answer is packed as {packed[:40]!r}, which nobody asked for", response=response)
        response.raw = _BoundedBody(response.raw, LARGEST_DOWNLOAD if stream else LARGEST_ANSWER)
        return response


class _BoundedBody:
    """The body of a response, which raises after so many bytes; whatever else is asked is the body's."""

    def __init__(self, body: Any, limit: int) -> None:
        self._body, self._limit, self._read = body, limit, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def stream(self, amt: int | None = _CHUNK, decode_content: bool | None = None) -> Iterator[bytes]:
        """Yield the body in pieces."""
        for piece in self._body.stream(min(amt or _CHUNK, _CHUNK), decode_content=decode_content):
            yield self._counted(piece)

    def read(self, amt: int | None = None, *args: Any, **options: Any) -> bytes:
        """Return so many bytes, or the rest."""
        return self._counted(self._body.read(self._limit - self._read + 1 if amt is None else amt, *args, **options))

    def _counted(self, piece: bytes) -> bytes:
        self._read += len(piece)
        if self._read > self._limit:
            self._body.close()  # what is left of it is for nobody
            raise BodyError(f"the answer is longer than {self._limit} bytes")
        return piece
