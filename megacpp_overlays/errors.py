"""The exceptions of this package, all under one base class.

    OverlayError
    +-- SettingsError     a name or value in the environment is not known      (also a ValueError)
    +-- RegistryError     a declaration is incomplete or collides with another
    +-- SourceError       the source of a module cannot be read, or no probe recognises it
    +-- SeamError         an attribute cannot be replaced or put back
    +-- ActivationError   `strict` is on and an overlay ended in conflict
    +-- RequirementError  a decision is not one that the run requires, or a requirement cannot be parsed
    +-- RanksError        ranks do not run the same code, or one of them did not say so in time
    +-- AuditFileError    a file has no audit that can be compared
    +-- ConfigurationError  a file has no model configuration that can be read
    +-- ChildrenError     a child process runs other code than its parent, or gave no receipt in time
    +-- StartupFileError  the `.pth` that arms an environment cannot be written, or does not arm it
    +-- LockError         a lock cannot be read, or an environment differs from its lock
    +-- CheckpointError   a checkpoint was written broken, or cannot be read
    +-- UpkeepError       a maintenance command of the overlays cannot do its work
        +-- MissingExtraError   a library that only this command needs is not installed

None of them is an ImportError. Megatron-Core takes an ImportError to mean "this optional package is missing"
and continues without it, so a failed overlay would go unnoticed.
"""

from __future__ import annotations

from typing import Any


class OverlayError(Exception):
    """Base class of every error that this package raises on purpose."""


class SettingsError(OverlayError, ValueError):
    """Raised at import when an environment variable of this package has an unknown name or value."""


class RegistryError(OverlayError):
    """Raised when overlays are registered twice, collide, or leave out a required field."""


class SourceError(OverlayError):
    """Raised when a module is present but its source text cannot be read or parsed, or no probe recognises it.

    Attributes:
        file: the file of the error, where the message does not name it.
        line: the line in it.
    """

    def __init__(self, text: str, *, file: str | None = None, line: int | None = None) -> None:
        super().__init__(text)
        self.file = file
        self.line = line


class SeamError(OverlayError):
    """Raised when an attribute cannot be replaced, or cannot be put back as it was."""


class ActivationError(OverlayError, RuntimeError):
    """Raised under `strict` when an overlay ended in conflict.

    The message names the overlay, its target, the evidence and the variable that switches it off.
    """


class RequirementError(OverlayError, RuntimeError):
    """Raised when a decision is not one that the run requires, or when a requirement cannot be parsed."""


class RanksError(OverlayError, RuntimeError):
    """Raised on every rank when ranks do not run the same code, or when one of them did not arrive in time.

    Attributes:
        differences: the differences, as `megacpp_overlays.processes.differences.Difference` with ranks as holders.
        missing: the ranks that did not arrive.
    """

    def __init__(self, text: str, *, differences: tuple[Any, ...] = (), missing: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.differences = differences
        self.missing = missing


class ChildrenError(OverlayError, RuntimeError):
    """Raised in a parent whose child process runs other code, or gave no receipt in time."""


class StartupFileError(OverlayError, RuntimeError):
    """Raised when the start-up file of an environment cannot be written, or a Python does not start armed with it."""


class AuditFileError(OverlayError, ValueError):
    """Raised when a file that should hold an audit cannot be read, or has no audit in a form that this version knows."""


class ConfigurationError(OverlayError, ValueError):
    """Raised when the configuration file of a model cannot be read, or is of an unknown kind."""


class LockError(OverlayError, ValueError):
    """Raised when a lock cannot be read, or when an environment differs from its lock."""


class UpkeepError(OverlayError, RuntimeError):
    """Raised when a maintenance command of the lane cannot do its work; the message names the missing part and the remedy."""


class MissingExtraError(UpkeepError):
    """Raised when a library that only one command needs is not installed; the message says how to install it."""


class CheckpointError(OverlayError, RuntimeError):
    """Raised when a checkpoint was written broken, when it cannot be read, or when one would be written wrong."""
