"""Errors of the host of threads, in a module without its client, so that reading saved answers needs no HTTP library."""

from __future__ import annotations

from datetime import datetime

from megacpp_overlays.errors import UpkeepError


class HostError(UpkeepError):
    """Base class of the errors of the host."""


class UnreachableError(HostError):
    """Raised when no connection can be made: no network, no such host, a refusing proxy, or an invalid certificate."""


class RateLimitError(HostError):
    """Raised when the host accepts no more requests for now.

    Attributes:
        until: the time when the host accepts requests again, UTC.
    """

    def __init__(self, until: datetime) -> None:
        super().__init__(f"the host takes no more requests until {until:%Y-%m-%d %H:%M:%S} UTC")
        self.until = until


class TokenRefusedError(HostError):
    """Raised when the host does not accept the token."""


class GoneError(HostError):
    """Raised when the requested object does not exist on the host, or is not visible to the client."""


class NoAnswerError(HostError):
    """Raised when one answer did not arrive, or is malformed."""
