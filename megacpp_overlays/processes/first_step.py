"""Checks before the first optimizer step of a run, without a line in its launcher.

    ranks are compared      at the end of every `init_process_group`, where all ranks meet anyway. Later, such as before a
                            forward pass, a rank may wait for one that waits for it: a stage of a pipeline does
    decisions are required  before the first step of any optimizer in a process: every target that the model needs has
                            been imported then, and nothing has been learned yet
    the audit is left       by rank 0, both times, and once more when the process ends, with the number of calls of each seam. A process
                            that takes no step, since it evaluates, leaves its audit only at its end, and only if it called a seam
                            and the file has no audit with calls

The hook before the first step is in `runtime.optimizers`. torch has no hook for process groups, so
`init_process_group` is called through a wrapper, but only where ranks are to be compared.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megacpp_overlays import files
from megacpp_overlays.concerns import report
from megacpp_overlays.errors import RanksError, RequirementError
from megacpp_overlays.loader import requirements
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.import_hooks import Hooks
from megacpp_overlays.loader.log import logger
from megacpp_overlays.loader.session import Session
from megacpp_overlays.processes import model_at_hand, ranks
from megacpp_overlays.runtime import optimizers

if TYPE_CHECKING:
    from megacpp_overlays.loader.rendering import AgreementData, AuditData, ModelData

GROUPS = "torch.distributed.distributed_c10d"
OPTIMIZERS = "torch.optim.optimizer"
_INIT = "init_process_group"


class FirstStep:
    """Hooks of this process that compare ranks, demand decisions and write audits, as the settings of a session ask."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hooks = Hooks(self)
        self._agreement: AgreementData | None = None
        self._model: ModelData | None = None
        self._left_in: int | None = None
        """Id of the process that left an audit, and leaves it once more at its exit."""

    def watch(self) -> None:
        """Wait for torch, and compare the ranks at once where their group is there. Watching twice is watching once.

        Raises:
            RanksError: see `verify_ranks`.
            ActivationError: see `verify_ranks`.
        """
        settings = self._session.settings
        if settings.audit or settings.required:
            self._hooks.watch(OPTIMIZERS)
        if settings.verify_ranks:
            self._hooks.watch(GROUPS)
            if ranks.initialized() is not None:
                self._compare()  # not in a hook, which lets no such error out of an import

    def loaded(self, name: str, module: ModuleType, *, late: bool) -> None:
        """Hook into torch (called by the hooks)."""
        if name == OPTIMIZERS:
            optimizers.before_the_first_step(module, self._check)
            if self._session.settings.audit:
                atexit.register(self._leave_without_a_step, Path(self._session.settings.audit), os.getpid())
        else:
            self._after_every_init(module)

    def failed(self, name: str, error: Exception) -> None:
        """Log that a part of torch cannot be watched (called by the hooks)."""
        effect = "ranks are not compared" if name == GROUPS else "nothing is checked before the first step"
        logger.warning("%s could not be watched, so %s: %s: %s", name, effect, type(error).__name__, error)

    def _after_every_init(self, module: ModuleType) -> None:
        original = getattr(module, _INIT)
        if getattr(original, "_megacpp_overlays_compares", False):
            return

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            answer = original(*args, **kwargs)
            self._compare()
            return answer

        vars(init_process_group)["_megacpp_overlays_compares"] = True
        for place in (module, sys.modules.get("torch.distributed")):
            if place is not None and vars(place).get(_INIT) is original:
                setattr(place, _INIT, init_process_group)

    def _compare(self) -> None:
        """Compare the ranks.

        Raises:
            RanksError: see `verify_ranks`.
            ActivationError: see `verify_ranks`.
        """
        size = sys.modules["torch.distributed"].get_world_size()
        try:
            audit = ranks.verify(self._session)
        except RanksError:
            self._agreement = {"size": size, "agreed": False}
            self._leave(self._session.audit())
            raise
        self._agreement = {"size": size, "agreed": True}
        self._leave(audit)

    def _check(self) -> None:
        """Leave the audit, and check that required overlays were decided as demanded.

        Raises:
            RequirementError: one was not; the text names each decision.
        """
        audit = self._session.audit()
        if self._session.settings.audit and self._is_first():
            self._look_at_the_model()
        self._leave(audit)
        if unmet := requirements.unmet(self._session.settings.required, audit):
            raise RequirementError("; ".join(map(str, unmet)))

    def _look_at_the_model(self) -> None:
        with contextlib.suppress(Exception):  # an audit without it is as good
            found = model_at_hand.before_the_first_step(self._session)
            self._model = None if found is None else report.as_dict(found)

    def _leave(self, audit: Audit) -> None:
        """Write the audit if this is rank 0 and a file is named. A failed write is logged and does not end the run."""
        path = self._session.settings.audit
        if path is None or not self._is_first():
            return
        try:
            leave(Path(path), audit, self._agreement, self._model)
        except OSError as error:
            logger.warning("%s: the audit cannot be written: %s", path, error.strerror)
            return
        if self._left_in != os.getpid():
            self._left_in = os.getpid()
            atexit.register(self._leave_at_exit, Path(path), os.getpid())

    def _is_first(self) -> bool:
        distributed = ranks.initialized()
        return (self._session.settings.rank if distributed is None else distributed.get_rank()) == 0

    def _leave_without_a_step(self, path: Path, pid: int) -> None:
        """Leave the audit of a process that took no step but called a seam.

        Agents and helpers call no seam. An audit with calls, left by another process, is kept.
        """
        if pid != os.getpid() or self._left_in == pid:
            return
        with contextlib.suppress(Exception):
            audit = self._session.current_audit()
            tells = _calls(json.loads(files.read_text(path))) > 0
            if self._is_first() and _calls(audit.as_dict()) and not tells:
                leave(path, audit, self._agreement)

    def _leave_at_exit(self, path: Path, pid: int) -> None:
        """Leave the final audit without deciding anything more; a forked child that ends leaves none."""
        if pid == os.getpid():
            with contextlib.suppress(Exception):  # the interpreter may be half torn down: an exit must not fail
                leave(path, self._session.current_audit(), self._agreement, self._model)


def leave(path: Path, audit: Audit, agreement: AgreementData | None = None, model: ModelData | None = None) -> None:
    """Write an audit as JSON, with the agreement of ranks and the model where they are known.

    Raises:
        OSError: it cannot be written; a file that was there is unchanged.
    """
    said = audit.as_dict()
    more = {"ranks": agreement, "model": model}
    data = {**said, **{key: value for key, value in more.items() if value is not None}}
    files.write_text(path, json.dumps(data, indent=2) + "\n")


def _calls(audit: AuditData) -> int:
    """Return the number of calls of seams in an audit as data."""
    return sum(sum(each["calls"].values()) for each in audit["decisions"])
