"""The errors this package raises, all under one base class.

    OverlayError
    +-- SettingsError     a name or value in the environment is not known      (also a ValueError)
    +-- RegistryError     a declaration is incomplete or collides with another
    +-- SourceError       the source of a module cannot be read
    +-- SeamError         an attribute cannot be replaced or put back
    +-- ActivationError   `strict` is on and an overlay ended in conflict

None of them is an ImportError: Megatron-Core reads an ImportError as "this optional package is missing"
and carries on without it, which would turn a failed overlay into silence.
"""

from __future__ import annotations


class OverlayError(Exception):
    """Base class of every error that this package raises on purpose."""


class SettingsError(OverlayError, ValueError):
    """Raised at import when an environment variable of ours has an unknown name or value."""


class RegistryError(OverlayError):
    """Raised when overlays are registered twice, collide, or leave out a required field."""


class SourceError(OverlayError):
    """Raised when a module is present but its source text cannot be read or parsed."""


class SeamError(OverlayError):
    """Raised when an attribute cannot be replaced, or cannot be put back as it was."""


class ActivationError(OverlayError, RuntimeError):
    """Raised under `strict` when an overlay ended in conflict.

    The message names the overlay, its target, the evidence and the variable that switches it off.
    """
