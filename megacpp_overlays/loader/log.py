"""Log of the decisions of a process, kept short for an engineer who reads it at 3 a.m. among a thousand ranks.

Rank 0 writes a line for each active overlay and one with the counts. Every rank writes its warnings. No process repeats a line
of an ancestor process, or its own last line about an overlay. The audit has everything, and the level `debug` logs it. By default the
log writes to stderr directly, because most launchers import this package before they configure logging.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from megacpp_overlays.errors import SettingsError
from megacpp_overlays.loader.settings import LOG, SAID, LogForm, Mode, Settings
from megacpp_overlays.model import Decision, Erratum, Record
from megacpp_overlays.version import NEWEST_PYTHON

if TYPE_CHECKING:
    from megacpp_overlays.loader.audit import Audit

logger = logging.getLogger("megacpp_overlays")


class Log:
    """Writer of decisions, in the form and from the level on that the settings select.

    Args:
        settings: of this process.
        environment: receives the hashes of written lines for child processes; None to pass on none.

    Raises:
        SettingsError: the log path cannot be opened for appending.
    """

    def __init__(self, settings: Settings, environment: MutableMapping[str, str] | None = None) -> None:
        self._settings = settings
        self._environment = environment
        self._least = logging.getLevelName(settings.log_level.value.upper())
        self._obsolete = settings.obsolete_variables
        # The last line about each overlay, and short hashes of all lines of this process and its ancestors.
        self._last: dict[str, str] = {}
        self._said = set(settings.said)
        self._has_printed = self._has_counted = self._is_silent = False
        self.is_concerned: Callable[[str], bool] | None = None
        """Returns whether an active overlay, by its id, may concern the model; None if there is no such check."""
        self._unconcerned: dict[str, None] = {}
        # Absolute, because a launcher may change its working directory later.
        self._path = None if settings.log_path is None else Path(settings.log_path).absolute()
        if self._path is not None:
            try:
                _opened(self._path).close()
            except OSError as error:
                raise SettingsError(f"{LOG}={settings.log_path} cannot be written: {error.strerror}") from error

    def leave_it_to_the_caller(self) -> None:
        """Write nothing to stderr from now on, because the caller prints an audit of all decisions."""
        self._is_silent = self._settings.log is LogForm.STDERR

    def armed(self, waiting: Sequence[str], off: Sequence[str]) -> None:
        """Log once, at import, the ids of overlays that are off and, as a detail, of those that wait; a child does not repeat it."""
        if self._settings.parent_is_armed:
            return
        self._log_newer_python()
        head = [f"mode {self._settings.mode.value}"]
        waits = [f"armed: {', '.join(waiting)}"] if waiting else []
        is_off = [f"off: {', '.join(off)}"] if off else []
        data: dict[str, object] = {"event": "armed", "armed": list(waiting), "off": list(off)}
        if self._is_json:
            self._write("", data, logging.INFO)
            return
        if self._tells_details:
            self._write("; ".join([*head, *waits, *is_off]), data, logging.DEBUG)
        if self._settings.mode is Mode.OFF:
            is_off = ["nothing is installed"]
        if (is_off or self._settings.mode is not Mode.AUTO) and not self._shows_details_alone(logging.INFO):
            self._write("; ".join([*head, *is_off]), data, logging.INFO)

    def _log_newer_python(self) -> None:
        """Log on rank 0 that this Python is newer than those that the package is tested on."""
        here = sys.version_info[:2]
        if here <= NEWEST_PYTHON or self._settings.rank != 0 or self._settings.mode is Mode.OFF:
            return
        names = [".".join(map(str, each)) for each in (here, NEWEST_PYTHON)]
        text = (
            f"Python {names[0]} is newer than {names[1]}, the newest that this package is tested on; if a probe does not "
            "recognise its syntax, that is a conflict, and nothing is installed"
        )
        self._write(text, {"event": "python", "text": text}, logging.INFO)

    def gates(self, records: Sequence[Record]) -> None:
        """Log the decisions of gates."""
        if self._settings.parent_is_armed:
            return
        for record in records:
            # Installed packages are the same on every rank, so only rank 0 logs them. A conflict may differ between ranks.
            alone = self._settings.rank != 0 and record.decision is not Decision.CONFLICT
            if record.decision in {Decision.GATED, Decision.CONFLICT, Decision.RETIRED} and not alone:
                self.decided(record)

    def obsolete_variables(self) -> None:
        """Log once the variables that name a retired overlay; a child does not repeat it."""
        sentences, self._obsolete = self._obsolete, ()
        for sentence in () if self._settings.parent_is_armed else sentences:
            self._write(sentence, {"event": "outlived", "text": sentence}, logging.INFO)

    def retired(self, sentence: str) -> None:
        """Log that a request names a retired overlay."""
        self._write(sentence, {"event": "outlived", "text": sentence}, logging.INFO)

    def other_copy(self, text: str) -> None:
        """Warn that another copy of this package than that on `sys.path` armed the process; a child does not repeat it."""
        if self._is_news("another copy", text):
            self._write(f"WARNING {text}", {"event": "other copy", "text": text}, logging.WARNING)

    def hub_copies(self, sentences: Sequence[str]) -> None:
        """Warn once of each copy of upstream code that came from the Hugging Face Hub; a child does not repeat its parent."""
        for text in sentences:
            if self._is_news(f"copy {text}", text):
                self._write(f"WARNING copy: {text}", {"event": "hub copy", "text": text}, logging.WARNING)

    def not_loaded(self, module: str, error: Exception) -> None:
        """Warn that no overlay of a target was installed, because the declarations could not be loaded."""
        self._not_loaded(module, f"the overlays of {module} cannot be loaded, and none of them is in", error)

    def gates_undecided(self, error: Exception) -> None:
        """Warn that gates could not be decided when torch was imported."""
        self._not_loaded("torch", "the gates cannot be loaded, and none of them warns", error)

    def _not_loaded(self, module: str, problem: str, error: Exception) -> None:
        text = f"WARNING conflict: {problem}: {type(error).__name__}: {error}"
        self._write(text, {"event": "not loaded", "module": module, "error": repr(error)}, logging.WARNING)

    def decided(self, record: Record) -> None:
        """Log the decision on one overlay, or on a part of it."""
        from megacpp_overlays.loader import lines, rendering  # noqa: PLC0415 - at import there is nothing to log

        level = logging.WARNING if lines.is_warning(record) else logging.INFO
        if self._is_json:
            self._write("", {"event": "decision", **rendering.as_dict(record)}, level)
            self._has_printed = True
            return
        if self._tells_details and level < logging.WARNING:
            self._write(lines.detail(record), {}, logging.DEBUG)
        if record.decision is Decision.ACTIVE and not self._is_concerned(record.overlay.id):
            self._unconcerned[record.overlay.id] = None
            return
        if (
            (text := lines.of_decision(record))
            and self._is_news(_subject(record), text)
            and not self._shows_details_alone(level)
        ):
            self._write(text, {}, level)

    def _is_concerned(self, overlay_id: str) -> bool:
        if self.is_concerned is None or self._is_kept_back(logging.INFO):
            return True
        try:
            return self.is_concerned(overlay_id)
        except Exception:  # noqa: BLE001 - an extra line is better than a failed import
            return True

    def model(self, text: str, data: dict[str, object]) -> None:
        """Log the active overlays that concern the model, before its first step."""
        if self._is_news("the model", text):
            self._write(text, data, logging.INFO)

    def unread(self, text: str) -> None:
        """Warn that the configuration file of the model cannot be read."""
        if self._is_news("the configuration", text):
            self._write(f"WARNING {text}", {"event": "unread", "text": text}, logging.WARNING)

    @property
    def tells_everyday(self) -> bool:
        """Whether lines below the level of a warning are written."""
        return not self._is_kept_back(logging.INFO)

    def has_to_count(self, *, at_exit: bool) -> bool:
        """Return whether `count` may write a line; if not, the caller can skip the audit for it."""
        is_child = self._settings.parent_is_armed or bool(self._settings.said)
        has_nothing_new = is_child and not self._has_printed and (at_exit or bool(self._settings.said))
        is_kept_back = self._is_kept_back(logging.INFO) or self._settings.mode is Mode.OFF
        return not ((self._has_counted and not at_exit) or has_nothing_new or is_kept_back)

    def count(self, audit: Audit, *, at_exit: bool = False) -> None:
        """Log once the number of overlays for each decision, and at the end of a process those that were never called.

        A child that logged nothing else writes no count.

        Args:
            audit: the current audit.
            at_exit: whether the process ends.
        """
        if not self.has_to_count(at_exit=at_exit):
            return
        from megacpp_overlays.loader import lines  # noqa: PLC0415 - at import there is nothing to count

        unused: dict[str, object] = {"never_called": lines.never_called(audit.decisions)} if at_exit else {}
        if self._has_counted:
            if text := lines.unused(audit.decisions):
                self._write(text, {"event": "never called", **unused}, logging.INFO)
            return
        self._has_counted = True
        fingerprint = audit.fingerprint
        text = lines.summary(audit.version, audit.mode, audit.decisions, fingerprint, at_exit=at_exit)
        if self._unconcerned:
            text += f"; {len(self._unconcerned)} active that do not concern this model have no line"
        counts: dict[str, list[str]] = {}
        for name, decision in lines.by_overlay(audit.decisions).items():
            counts.setdefault(decision.value, []).append(name)
        self._write(text, {"event": "count", "fingerprint": fingerprint, **counts, **unused}, logging.INFO)

    def _is_news(self, overlay_id: str, text: str) -> bool:
        """Return whether neither this process nor an ancestor has logged a line; record it as logged."""
        import zlib  # noqa: PLC0415 - at import there is nothing to log

        short = f"{zlib.crc32(text.encode()):08x}"
        last, self._last[overlay_id] = self._last.get(overlay_id), text
        if last == text or (last is None and short in self._said):
            return False
        self._said.add(short)
        self._has_printed = True
        if self._environment is not None:
            self._environment[SAID] = ",".join(sorted(self._said))
        return True

    @property
    def _is_json(self) -> bool:
        is_rows = self._path is not None and self._path.suffix in {".json", ".jsonl"}
        return is_rows or self._settings.log is LogForm.JSON

    @property
    def _tells_details(self) -> bool:
        # A logger has levels of its own.
        return self._least <= logging.DEBUG or self._settings.log is LogForm.LOGGING

    def _shows_details_alone(self, level: int) -> bool:
        return self._least <= logging.DEBUG and self._settings.log is not LogForm.LOGGING and level < logging.WARNING

    def dropped(self, overlay: Erratum, graphs: str) -> None:
        """Log that compiled graphs were dropped, because a model that compiles again stops for minutes."""
        text = f"dropped {graphs} of torch.compile, for the sake of {overlay.id}; they compile again at their next call"
        self._write(text, {"event": "dropped", "id": overlay.id, "graphs": graphs}, logging.INFO)

    def unchecked(self, overlay: Erratum, error: Exception) -> None:
        """Warn that an overlay could not be checked before its first call; it stays installed."""
        text = f"{overlay.id} could not be checked before its first call: {type(error).__name__}: {error}"
        self._write(text, {"event": "unchecked", "id": overlay.id}, logging.WARNING)

    def _is_kept_back(self, level: int) -> bool:
        is_for_others = self._settings.rank != 0 and level < logging.WARNING
        is_too_little = level < self._least and self._settings.log is not LogForm.LOGGING
        return is_for_others or is_too_little or self._is_silent

    def _write(self, text: str, data: dict[str, object], level: int) -> None:
        if self._is_kept_back(level):
            return
        try:
            text = _one_line(text)
            self._write_as_asked(text, data, level)
        except Exception as error:  # noqa: BLE001 - a full disk or a third-party handler must not stop an import
            with contextlib.suppress(Exception):  # an error whose __str__ raises must not stop it either
                why = f"{LOG} does not work: {type(error).__name__}: {_one_line(str(error))}"
                _print(f"[megacpp_overlays] {text} | {why}")

    def _write_as_asked(self, text: str, data: dict[str, object], level: int) -> None:
        rank = f" rank {self._settings.rank}" if self._settings.rank else ""
        if self._settings.log is LogForm.LOGGING:
            logger.log(level, "%s", text)
        elif self._path is not None:
            row = self._json(data) if self._is_json else f"[megacpp_overlays{rank}] {text}"
            with _opened(self._path) as file:
                file.write(f"{row}\n")
        else:
            _print(self._json(data) if self._is_json else f"[megacpp_overlays{rank}] {text}")

    def _json(self, data: dict[str, object]) -> str:
        import json  # noqa: PLC0415 - the default form does not need it

        return json.dumps({**data, "rank": self._settings.rank})


def _one_line(text: str) -> str:
    """Return a text as one line, with line ends and other control characters of upstream's texts escaped."""
    if text.isprintable():
        return text
    from megacpp_overlays.terminal_text import one_line  # noqa: PLC0415 - at import all texts are of this package

    return one_line(text)


def _opened(path: Path) -> TextIO:
    """Open a log for appending; a FIFO without a reader raises an error and does not block."""
    from megacpp_overlays import files  # noqa: PLC0415 - the default form opens no file

    files.demand_trusted_links(path)
    return open(path, "a", encoding="utf-8", errors="backslashreplace", opener=_at_once)


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _print(row: str) -> None:
    stream = getattr(sys, "stderr", None)
    if stream is None:  # a windowless process
        return
    try:
        print(row, file=stream, flush=True)
    except Exception:  # noqa: BLE001 - a closed or broken stream, or a third-party object
        with contextlib.suppress(Exception):  # without a handler of the application, logging writes to the same stream
            logger.warning("%s", row)


def _subject(record: Record) -> str:
    """Return the subject of a line: the id of an overlay, or the distribution of all overlays that are unproved on a release."""
    return record.overlay.target.distribution if record.decision is Decision.UNPROVED else record.overlay.id
