"""Decision lines, written for an engineer who reads them at 3 a.m. among a thousand ranks.

Rank 0 prints every decision, other ranks print only conflicts; all of them keep everything for the audit. The
default writes to stderr itself, because most launchers import us before they configure logging.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from megacpp_overlays.errors import SettingsError
from megacpp_overlays.loader.settings import LOG, LogForm, Settings
from megacpp_overlays.model import Decision, Erratum, Record

logger = logging.getLogger("megacpp_overlays")

_LEVELS = {Decision.CONFLICT: logging.WARNING, Decision.GATED: logging.WARNING}
_SAID_AT_ONCE = frozenset({Decision.GATED, Decision.CONFLICT, Decision.RETIRED})


class Log:
    """Writes one line per decision in the form that the settings ask for.

    Raises:
        SettingsError: the log path cannot be opened for appending.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._obsolete = settings.obsolete_variables
        # Absolute, because a launcher may change its folder later.
        self._path = None if settings.log_path is None else Path(settings.log_path).absolute()
        if self._path is not None:
            try:
                _opened(self._path).close()
            except OSError as error:
                raise SettingsError(f"{LOG}={settings.log_path} cannot be written: {error.strerror}") from error

    def armed(self, waiting: Sequence[str], off: Sequence[str]) -> None:
        """Say once, at import, what waits and what is off, by ids; a child does not repeat its parent."""
        if self._settings.parent_is_armed:
            return
        words = [f"mode {self._settings.mode.value}"]
        words += [f"armed: {', '.join(waiting)}"] if waiting else []
        words += [f"off: {', '.join(off)}"] if off else []
        self._write("; ".join(words), {"event": "armed", "armed": list(waiting), "off": list(off)}, logging.INFO)

    def gates(self, records: Sequence[Record]) -> None:
        """Say what gates found; nothing of those that found nothing."""
        if self._settings.parent_is_armed:
            return
        for record in records:
            # What is installed is the same on every rank, so one of them says it; a gate that was not understood may not be.
            alone = self._settings.rank != 0 and record.decision is not Decision.CONFLICT
            if record.decision in _SAID_AT_ONCE and not alone:
                self.decided(record)

    def obsolete_variables(self) -> None:
        """Say once which variables name a retired overlay; a child does not repeat it either."""
        sentences, self._obsolete = self._obsolete, ()
        for sentence in () if self._settings.parent_is_armed else sentences:
            self._write(sentence, {"event": "outlived", "text": sentence}, logging.INFO)

    def retired(self, sentence: str) -> None:
        """Say that what was asked for is about a retired overlay."""
        self._write(sentence, {"event": "outlived", "text": sentence}, logging.INFO)

    def not_loaded(self, module: str, error: Exception) -> None:
        """Say that nothing was done about a target, because the declarations could not be loaded."""
        text = f"conflict: the overlays of {module} cannot be loaded, and none of them is in: {type(error).__name__}: {error}"
        self._write(text, {"event": "not loaded", "module": module, "error": repr(error)}, logging.WARNING)

    def decided(self, record: Record) -> None:
        """Say what was decided about one overlay."""
        from megacpp_overlays.loader.rendering import as_dict, line  # noqa: PLC0415 - at import there is nothing to say

        level = _LEVELS.get(record.decision, logging.INFO)
        self._write(line(record), {"event": "decision", **as_dict(record)}, level)

    def dropped(self, overlay: Erratum, graphs: str) -> None:
        """Say that compiled graphs are gone, because a model that compiles again stands still for minutes."""
        text = f"dropped {graphs} of torch.compile, for the sake of {overlay.id}; what is called again compiles again"
        self._write(text, {"event": "dropped", "id": overlay.id, "graphs": graphs}, logging.INFO)

    def _write(self, text: str, data: dict[str, object], level: int) -> None:
        if self._settings.rank != 0 and level < logging.WARNING:
            return
        try:
            text = _one_line(text)
            self._write_as_asked(text, data, level)
        except Exception as error:  # noqa: BLE001 - a full disk or somebody's handler must not stop an import
            with contextlib.suppress(Exception):  # nor an error that cannot say what it is
                why = f"{LOG} does not work: {type(error).__name__}: {_one_line(str(error))}"
                _print(f"[megacpp_overlays] {text} | {why}")

    def _write_as_asked(self, text: str, data: dict[str, object], level: int) -> None:
        rank = f" rank {self._settings.rank}" if self._settings.rank else ""
        if self._settings.log is LogForm.LOGGING:
            logger.log(level, "%s", text)
        elif self._path is not None:
            row = self._json(data) if self._path.suffix in {".json", ".jsonl"} else f"[megacpp_overlays{rank}] {text}"
            with _opened(self._path) as file:
                file.write(f"{row}\n")
        else:
            _print(self._json(data) if self._settings.log is LogForm.JSON else f"[megacpp_overlays{rank}] {text}")

    def _json(self, data: dict[str, object]) -> str:
        import json  # noqa: PLC0415 - the default form does not need it

        return json.dumps({**data, "rank": self._settings.rank})


def _one_line(text: str) -> str:
    """Return a text that is one line whatever upstream put into it, such as an exception of several."""
    if text.isprintable():
        return text
    from megacpp_overlays.terminal_text import one_line  # noqa: PLC0415 - at import there are only words of our own

    return one_line(text)


def _opened(path: Path) -> TextIO:
    """Open a log for appending; a FIFO that nobody reads is an error and no reason to wait."""
    return open(path, "a", encoding="utf-8", errors="backslashreplace", opener=_at_once)


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _print(row: str) -> None:
    stream = getattr(sys, "stderr", None)
    if stream is None:  # a windowless process
        return
    try:
        print(row, file=stream, flush=True)
    except Exception:  # noqa: BLE001 - closed, broken, or somebody's object
        with contextlib.suppress(Exception):  # without a handler of somebody's, logging writes to the same stream
            logger.warning("%s", row)
