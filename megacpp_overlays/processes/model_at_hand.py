"""Configuration of the model that this process trains, and the log line before its first step about the overlays that concern it.

The configuration has two sources:

    at start-up             a configuration file that `MEGACPP_OVERLAYS_CONFIG` names, or the arguments of one of Megatron-LM's launchers
    before the first step   the configuration objects of Megatron in this process

At start-up an overlay that does not concern the model is installed all the same, but has no log line of its own. The line before the
first step is written from a hook of torch's optimizers (`runtime.optimizers`). The hook is registered on rank 0 alone, and only if an
overlay of Megatron-Core is active and the log has lines below the level of a warning. It is removed before the line is written.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megacpp_overlays.concerns import command_lines, config_files, process, report
from megacpp_overlays.concerns.configuration import Configuration
from megacpp_overlays.concerns.features import PROGRAMS
from megacpp_overlays.errors import ConfigurationError
from megacpp_overlays.loader.import_hooks import Hooks
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Record
from megacpp_overlays.runtime import optimizers

DISTRIBUTION = "megatron-core"
OPTIMIZERS = "torch.optim.optimizer"


def is_concerned(session: Session, overlay_id: str) -> bool:
    """Return whether an overlay may concern the model of this process, by the configuration at start-up; True if none is known."""
    known = _at_startup(session)
    return known is None or known.is_concerned(overlay_id)


@functools.lru_cache(maxsize=1)
def _at_startup(session: Session) -> report.Concerns | None:
    configuration = _given(session)
    return None if configuration is None else report.concerns(session.overlays, configuration)


def _given(session: Session) -> Configuration | None:
    if session.settings.config is not None:
        try:
            return config_files.read(Path(session.settings.config))
        except ConfigurationError as error:
            session.log.unread(str(error))
            return None
    words = sys.argv
    if words and Path(words[0]).name in PROGRAMS:
        return command_lines.from_words(words, f"the arguments of {Path(words[0]).name}")
    return None


def before_the_first_step(session: Session) -> report.Concerns | None:
    """Return whether each overlay concerns the model, or None if no configuration is known.

    The configuration objects in this process decide; without any, the configuration at start-up does.
    """
    configuration = process.of_this_process()
    return _at_startup(session) if configuration is None else report.concerns(session.overlays, configuration)


class ModelLine:
    """Writer of one log line before the first step of an optimizer: the active overlays that concern the model, and those that do not."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hooks = Hooks(self)

    def active(self, record: Record) -> bool:
        """Watch for the first step if an overlay of Megatron-Core became active; return whether it is one.

        Args:
            record: the record of the overlay that became active.
        """
        if record.overlay.target.distribution != DISTRIBUTION:
            return False
        if self._session.settings.rank == 0 and self._session.log.tells_everyday:
            self._hooks.watch(OPTIMIZERS)
        return True

    def loaded(self, name: str, module: ModuleType, *, late: bool) -> None:
        """Register the line with torch's optimizers (called by the hooks)."""
        optimizers.before_the_first_step(module, self._say)

    def failed(self, name: str, error: Exception) -> None:
        """Do nothing, so that the line is left out (called by the hooks)."""

    def _say(self) -> None:
        with contextlib.suppress(Exception):  # a log line must not end a run
            found = before_the_first_step(self._session)
            if found is not None:
                names = report.active(self._session.current_audit().decisions)
                data: dict[str, Any] = {"event": "model", **report.as_dict(found)}
                self._session.log.model(report.line(found, names), data)
