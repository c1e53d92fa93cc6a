"""Import-time overlays for training stacks that outrun their upstreams.

Import this package first in a launcher. It arms a few hooks and returns; torch and the
upstreams are not imported. When an upstream module is imported later, the overlay for it probes the code that
is really installed and replaces a narrow part of it only if it is still broken.

    import megacpp_overlays
    ...
    print(megacpp_overlays.audit())

Raises at import:
    SettingsError: an environment variable of ours has an unknown name or value.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

from megacpp_overlays.errors import (
    ActivationError,
    ChildrenError,
    OverlayError,
    RanksError,
    RegistryError,
    RequirementError,
    SeamError,
    SettingsError,
    SourceError,
)
from megacpp_overlays.loader import import_hooks, registry
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.session import current
from megacpp_overlays.version import VERSION

if TYPE_CHECKING:
    from datetime import timedelta

    from megacpp_overlays.model import Record
    from megacpp_overlays.processes.children import Children

__all__ = [
    "ActivationError",
    "Audit",
    "ChildrenError",
    "OverlayError",
    "RanksError",
    "RegistryError",
    "RequirementError",
    "SeamError",
    "SettingsError",
    "SourceError",
    "__version__",
    "arm",
    "audit",
    "child_environment",
    "reach_children",
    "undo",
    "verify_ranks",
]


__version__ = VERSION


def __dir__() -> list[str]:
    """Return what this package offers, without what it is made of."""
    return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]


def arm() -> None:
    """Arm every overlay; done at import. Call it again to reinstall what `undo` took out."""
    current().arm()


def audit(*, deep: bool = False) -> Audit:
    """Return all decisions of this process: print it, store `as_dict()`, compare `fingerprint`.

    Every seam is looked up in the live process: what somebody replaced, wrapped or executed again since is a conflict, or
    is named.

    Args:
        deep: whether to walk over the heap, too, for objects that hold an original; it takes tens of milliseconds, and
            seconds in a process with millions of objects.

    Raises:
        ActivationError: MEGACPP_OVERLAYS=strict and an overlay ended in conflict.
    """
    audit = current().audit(deep=deep)
    current().log.count(audit)
    audit.raise_if_strict()
    return audit


def undo(overlay_id: str | None = None) -> None:
    """Put back exactly what one overlay, or every overlay, replaced.

    Raises:
        SeamError: somebody replaced an attribute after us; putting ours back would drop theirs.
    """
    current().undo(overlay_id)


def reach_children(receipts: bool | str | os.PathLike[str] = False) -> Children:
    """Arm every Python child of this environment that is started from now on, and theirs, before its first line.

    Args:
        receipts: where children say what they decided: a folder, or True for a fresh one; see `children.Children`.

    Returns:
        A handle, also a context manager: `demand()` checks that children run the code of this process, `close()` undoes.

    Raises:
        SettingsError: the folder cannot be written.
        ChildrenError: this package lies in a folder that PYTHONPATH cannot name.
    """
    from megacpp_overlays.processes import children  # noqa: PLC0415 - an import of the package only arms

    return children.reach_children(receipts)


def child_environment() -> dict[str, str]:
    """Return the variables with which a Python of this environment arms at start-up, in the state of this process.

    Raises:
        ChildrenError: this package lies in a folder that PYTHONPATH cannot name.
    """
    from megacpp_overlays.processes import children  # noqa: PLC0415

    return children.child_environment()


def verify_ranks(group: Any = None, timeout: float | timedelta = 300.0) -> Audit:
    """Before step 1: return the audit if all ranks run the same code, and raise on every one of them if they do not.

    Call it on every rank, after `torch.distributed.init_process_group` and after the imports of the model. Ranks meet in
    the store of the process group, so that no device is touched and no rank can hang another: whoever has not arrived when
    the first rank's time is up is named on all others. A process on its own returns its audit; so does a rank that is not
    in the group.

    Args:
        group: a process group of torch.distributed; None is the default group.
        timeout: seconds, or a timedelta, that this rank waits for the others. The answer comes within a minute after
            it even if the store has gone.

    Raises:
        RanksError: ranks differ or are missing, or the store cannot be asked. The text has a table: which ranks, which
            overlay, what differs, what to do.
        ActivationError: they agree, MEGACPP_OVERLAYS=strict, and an overlay ended in conflict.
    """
    from megacpp_overlays.processes import ranks  # noqa: PLC0415

    return ranks.verify(current(), group, timeout)


def _count_at_exit() -> None:
    if os.getpid() == _PID:  # a fork that ends as its parent does would count what its parent counts
        current().count_at_exit()


def _is_concerned(overlay_id: str) -> bool:
    from megacpp_overlays.processes import model_at_hand  # noqa: PLC0415 - nothing is active when the package is imported

    return model_at_hand.is_concerned(current(), overlay_id)


def _wait_for_the_model(record: Record) -> bool:
    from megacpp_overlays.processes import model_at_hand  # noqa: PLC0415

    return model_at_hand.ModelLine(current()).active(record)


_PID = os.getpid()
_startup_file: str = globals().get("_startup_file", "")
"""The `.pth` file of `megacpp-overlays enable` that armed this process; empty where something else did."""


def _arm_at_import() -> None:
    atexit.unregister(_count_at_exit)
    atexit.register(_count_at_exit)
    try:
        current().when_active = _wait_for_the_model
        current().log.is_concerned = _is_concerned
        if _startup_file:
            from megacpp_overlays.processes import startup_arming  # noqa: PLC0415

            startup_arming.arm(current(), _startup_file)
        else:
            arm()
        if current().settings.receipts:
            from megacpp_overlays.processes.child_reports import write_receipts_that_are_asked_for  # noqa: PLC0415

            write_receipts_that_are_asked_for(current())
        if current().settings.waits_for_the_first_step:
            from megacpp_overlays.processes import first_step  # noqa: PLC0415

            first_step.FirstStep(current()).watch()
    except registry.HalfImportedPluginError as error:
        # The plugin imports this package: it is armed when the last line of the plugin has been executed.
        import_hooks.when_complete(error.module, _arm_at_import)


def _is_own_command(argv: list[str]) -> bool:
    as_module = any(pair == ("-m", __name__) for pair in itertools.pairwise(argv))
    return as_module or any(word.endswith("/megacpp-overlays") for word in argv[1:2])


if not _is_own_command(sys.orig_argv):  # a command arms what it is about, and most are about none of this process
    _arm_at_import()
vars(sys).setdefault("_megacpp_overlays", sys.modules[__name__])  # what a second import of this package leads to
