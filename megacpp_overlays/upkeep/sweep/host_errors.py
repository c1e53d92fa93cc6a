"""Errors of the host of threads. They are apart from its client, so that saved answers are read without an HTTP library."""

from __future__ import annotations

from datetime import datetime

from megacpp_overlays.errors import UpkeepError


class HostError(UpkeepError):
    """Base class of what can go wrong with the host."""


class UnreachableError(HostError):
    """Raised when no connection comes about: no network, no such host, a proxy or a certificate that refuses."""


class RateLimitError(HostError):
    """Raised when the host wants no more requests for now.

    Attributes:
        until: when it takes requests again, UTC.
    """

    def __init__(self, until: datetime) -> None:
        super().__init__(f"the host takes no more requests until {until:%Y-%m-%d %H:%M:%S} UTC")
        self.until = until


class TokenRefusedError(HostError):
    """Raised when the host does not take the token."""


class GoneError(HostError):
    """Raised when the host knows no such thing, or does not show it."""


class NoAnswerError(HostError):
    """Raised when one answer did not come, or is not what it should be."""
