"""Runtime patches ("overlays") of upstream defects in a training stack, applied when the upstream library is imported.

Import this package first in a launcher. The import registers a few import hooks and returns; it imports neither torch nor
an upstream library. When an upstream module is imported later, its overlay probes the source that is installed, and replaces
a narrow part of the module only if that source still has the defect.

    import megacpp_overlays
    ...
    print(megacpp_overlays.audit())

Raises at import:
    SettingsError: an environment variable of this package has an unknown name or value.
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
    """Return the public names of this package, without its submodules and imports."""
    return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]


def arm() -> None:
    """Arm every overlay. The import of this package does it; call it again to reinstall overlays after `undo`."""
    current().arm()


def audit(*, deep: bool = False) -> Audit:
    """Return all decisions of this process as an `Audit`: print it, store `as_dict()`, compare `fingerprint`.

    The audit resolves every seam in the running process. A seam that other code has replaced, wrapped or executed again since
    it was installed is a conflict, or is named in the record.

    Args:
        deep: whether to walk over the heap, too, for objects that still hold an original function. The walk takes tens of
            milliseconds, and seconds in a process with millions of objects.

    Raises:
        ActivationError: MEGACPP_OVERLAYS=strict and an overlay ended in conflict.
    """
    audit = current().audit(deep=deep)
    current().log.count(audit)
    audit.raise_if_strict()
    return audit


def undo(overlay_id: str | None = None) -> None:
    """Restore the upstream attributes that one overlay, or every overlay, replaced.

    Raises:
        SeamError: other code replaced an attribute after the overlay did; restoring the original would drop that change.
    """
    current().undo(overlay_id)


def reach_children(receipts: bool | str | os.PathLike[str] = False) -> Children:
    """Arm every Python process of this environment that is started from now on, at any depth, before its first line.

    Args:
        receipts: the folder in which children record their decisions, or True for a new folder; see `children.Children`.

    Returns:
        A handle, also a context manager. `demand()` checks that children run the code of this process; `close()` undoes
        the call.

    Raises:
        SettingsError: the folder cannot be written.
        ChildrenError: this package lies in a folder that PYTHONPATH cannot name.
    """
    from megacpp_overlays.processes import children  # noqa: PLC0415 - an import of the package only arms

    return children.reach_children(receipts)


def child_environment() -> dict[str, str]:
    """Return environment variables for a child Python: with them it arms at start-up, under the settings of this process.

    Raises:
        ChildrenError: this package lies in a folder that PYTHONPATH cannot name.
    """
    from megacpp_overlays.processes import children  # noqa: PLC0415

    return children.child_environment()


def verify_ranks(group: Any = None, timeout: float | timedelta = 300.0) -> Audit:
    """Return the audit if all ranks run the same code; raise on every rank if they do not. Call it before step 1.

    Call it on every rank, after `torch.distributed.init_process_group` and after the imports of the model. Ranks exchange
    their decisions through the store of the process group, so the call touches no device, and no rank can hang another. A rank
    that has not arrived when the first rank's timeout ends is reported as missing on all others. A single process returns its
    audit, and so does a rank that is not in the group.

    Args:
        group: a process group of torch.distributed; None is the default group.
        timeout: seconds, or a timedelta, that this rank waits for the others. The answer comes within a minute after
            it even if the store has gone.

    Raises:
        RanksError: ranks differ or are missing, or the store cannot be read. The message has a table of the ranks, the
            overlay, the difference and the remedy.
        ActivationError: the ranks agree, MEGACPP_OVERLAYS=strict, and an overlay ended in conflict.
    """
    from megacpp_overlays.processes import ranks  # noqa: PLC0415

    return ranks.verify(current(), group, timeout)


def _count_at_exit() -> None:
    if os.getpid() == _PID:  # a forked child inherits this handler, and would write the counts of its parent again
        current().count_at_exit()


def _is_concerned(overlay_id: str) -> bool:
    from megacpp_overlays.processes import model_at_hand  # noqa: PLC0415 - nothing is active when the package is imported

    return model_at_hand.is_concerned(current(), overlay_id)


def _wait_for_the_model(record: Record) -> bool:
    from megacpp_overlays.processes import model_at_hand  # noqa: PLC0415

    return model_at_hand.ModelLine(current()).active(record)


_PID = os.getpid()
_startup_file: str = globals().get("_startup_file", "")
"""The `.pth` file of `megacpp-overlays enable` that armed this process; empty if the process was armed another way."""


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
        # The plugin imports this package; arming waits until the last line of the plugin has been executed.
        import_hooks.when_complete(error.module, _arm_at_import)


def _is_own_command(argv: list[str]) -> bool:
    as_module = any(pair == ("-m", __name__) for pair in itertools.pairwise(argv))
    return as_module or any(word.endswith("/megacpp-overlays") for word in argv[1:2])


if not _is_own_command(sys.orig_argv):  # a command of this package arms only the overlays that it needs, mostly none
    _arm_at_import()
vars(sys).setdefault("_megacpp_overlays", sys.modules[__name__])  # a second import of this package returns this module
