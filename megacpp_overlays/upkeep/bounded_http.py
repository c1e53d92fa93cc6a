"""HTTP responses with a limit on the length of their body.

The limit counts unpacked bytes. Only gzip and deflate are accepted as encodings, one at a time: they unpack a thousandfold
at the most, so a small piece of a body never becomes a large one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from megacpp_overlays import files

LARGEST_ANSWER = files.LARGEST
"""Maximum number of bytes of a body that is read as a whole."""
LARGEST_DOWNLOAD = 4 << 30
"""Maximum number of bytes of a body that is streamed to a file: a wheel may contain compiled kernels."""
_PACKED = ("gzip", "deflate")
_CHUNK = 1 << 14


class BodyError(requests.RequestException):
    """Raised for a body that is too long, or has an encoding that the request did not accept."""


class BoundedAdapter(HTTPAdapter):
    """An adapter of `requests` whose responses raise where their body exceeds the limit."""

    def add_headers(self, request: requests.PreparedRequest, **_: Any) -> None:
        """Request an encoding that can be unpacked piece by piece."""
        request.headers["Accept-Encoding"] = ", ".join(_PACKED)

    def send(self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **options: Any) -> Any:
        """Send a request; see `requests.adapters.HTTPAdapter.send`.

        Raises:
            BodyError: the body has another encoding. A body that is too long raises it when it is read.
        """
        response = super().send(request, stream, *args, **options)
        packed = response.headers.get("Content-Encoding", "").strip().lower()
        if packed not in ("", "identity", *_PACKED):
            response.close()
            raise BodyError(f"the answer is packed as {packed[:40]!r}, which was not requested", response=response)
        response.raw = _BoundedBody(response.raw, LARGEST_DOWNLOAD if stream else LARGEST_ANSWER)
        return response


class _BoundedBody:
    """A proxy of a response's body, which raises after `limit` bytes."""

    def __init__(self, body: Any, limit: int) -> None:
        self._body, self._limit, self._read = body, limit, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def stream(self, amt: int | None = _CHUNK, decode_content: bool | None = None) -> Iterator[bytes]:
        """Yield the body in pieces."""
        for piece in self._body.stream(min(amt or _CHUNK, _CHUNK), decode_content=decode_content):
            yield self._counted(piece)

    def read(self, amt: int | None = None, *args: Any, **options: Any) -> bytes:
        """Return `amt` bytes, or the rest of the body."""
        return self._counted(self._body.read(self._limit - self._read + 1 if amt is None else amt, *args, **options))

    def _counted(self, piece: bytes) -> bytes:
        self._read += len(piece)
        if self._read > self._limit:
            self._body.close()  # the rest is not read
            raise BodyError(f"the answer is longer than {self._limit} bytes")
        return piece
