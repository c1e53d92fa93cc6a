"""Import-time overlays for training stacks that outrun their upstreams.

Import this package first in a launcher. It arms a few hooks and returns within milliseconds; torch and the
upstreams are not imported. When an upstream module is imported later, the overlay for it probes the code that
is really installed and replaces a narrow part of it only if it is still broken.

    import megacpp_overlays
    ...
    print(megacpp_overlays.audit())

Raises at import:
    SettingsError: an environment variable of ours has an unknown name or value.
"""

from __future__ import annotations

import itertools
import sys

# First, so that the function below and not the submodule is what `megacpp_overlays.audit` means.
from megacpp_overlays.audit import Audit
from megacpp_overlays.errors import (
    ActivationError,
    OverlayError,
    RegistryError,
    SeamError,
    SettingsError,
    SourceError,
)
from megacpp_overlays.lane import current
from megacpp_overlays.version import VERSION

__all__ = [
    "ActivationError",
    "Audit",
    "OverlayError",
    "RegistryError",
    "SeamError",
    "SettingsError",
    "SourceError",
    "__version__",
    "arm",
    "audit",
    "undo",
]


__version__ = VERSION


def arm() -> None:
    """Arm every overlay; done at import. Call it again to reinstall what `undo` took out."""
    current().arm()


def audit() -> Audit:
    """Return all decisions of this process: print it, store `as_dict()`, compare `fingerprint`.

    Raises:
        ActivationError: MEGACPP_OVERLAYS=strict and an overlay ended in conflict.
    """
    return current().audit()


def undo(overlay_id: str | None = None) -> None:
    """Put back exactly what one overlay, or every overlay, replaced.

    Raises:
        SeamError: somebody replaced an attribute after us; putting ours back would drop theirs.
    """
    current().undo(overlay_id)


def _arm_at_import() -> None:
    try:
        arm()
    except SettingsError as error:
        # The command line promises exit code 2 for wrong usage, but importing its package comes first.
        if not _is_own_command(sys.orig_argv):
            raise
        print(f"megacpp-overlays: {error}", file=sys.stderr)
        sys.exit(2)


def _is_own_command(argv: list[str]) -> bool:
    as_module = any(pair == ("-m", __name__) for pair in itertools.pairwise(argv))
    return as_module or any(word.endswith("/megacpp-overlays") for word in argv[1:2])


_arm_at_import()
