"""Decision lines, written for an engineer who reads them at 3 a.m. among a thousand ranks.

Rank 0 prints every decision, other ranks print only conflicts; all of them keep everything for the audit. The
default writes to stderr itself, because most launchers import us before they configure logging.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megacpp_overlays.errors import SettingsError
from megacpp_overlays.loader.settings import LOG, LogForm, Settings
from megacpp_overlays.model import Decision, Gate, Overlay, Record, Verdict

logger = logging.getLogger("megacpp_overlays")

_LEVELS = {Decision.CONFLICT: logging.WARNING, Decision.GATED: logging.WARNING}
CAN_BE_SWITCHED_OFF = frozenset({Decision.ACTIVE, Decision.CONFLICT, Decision.GATED})
"""Decisions whose reader may want the variable that ends them."""
CAN_BE_DELETED = CAN_BE_SWITCHED_OFF | {Decision.RETIRED}
"""Decisions whose reader may ask how long this goes on."""
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
                self._path.open("a").close()
            except OSError as error:
                raise SettingsError(f"{LOG}={settings.log_path} cannot be written: {error.strerror}") from error

    def armed(self, records: Sequence[Record]) -> None:
        """Say once, at import, what waits, what is off and what the gates found; a child does not repeat its parent."""
        if self._settings.parent_is_armed:
            return
        waiting = _ids(records, Decision.ARMED)
        asked = [record for record in records if not record.overlay.opt_in]
        off = _ids(asked, Decision.DISABLED)
        words = [f"mode {self._settings.mode.value}"]
        words += [f"armed: {', '.join(waiting)}"] if waiting else []
        words += [f"off: {', '.join(off)}"] if off else []
        self._write("; ".join(words), {"event": "armed", "armed": waiting, "off": off}, logging.INFO)
        self.gates(records)

    def gates(self, records: Sequence[Record]) -> None:
        """Say what the gates among these found; nothing of those that found nothing."""
        if self._settings.parent_is_armed:
            return
        for record in records:
            # What is installed is the same on every rank, so one of them says it; a gate that was not understood may not be.
            alone = self._settings.rank != 0 and record.decision is not Decision.CONFLICT
            if isinstance(record.overlay, Gate) and record.decision in _SAID_AT_ONCE and not alone:
                self.decided(record)

    def obsolete_variables(self) -> None:
        """Say once which variables name a retired overlay; a child does not repeat it either."""
        sentences, self._obsolete = self._obsolete, ()
        for sentence in () if self._settings.parent_is_armed else sentences:
            self._write(sentence, {"event": "outlived", "text": sentence}, logging.INFO)

    def retired(self, sentence: str) -> None:
        """Say that what was asked for is about a retired overlay."""
        self._write(sentence, {"event": "outlived", "text": sentence}, logging.INFO)

    def decided(self, record: Record) -> None:
        """Say what was decided about one overlay."""
        level = _LEVELS.get(record.decision, logging.INFO)
        self._write(line(record), {"event": "decision", **as_dict(record)}, level)

    def dropped(self, overlay: Overlay, graphs: str) -> None:
        """Say that compiled graphs are gone, because a model that compiles again stands still for minutes."""
        text = f"dropped {graphs} of torch.compile, for the sake of {overlay.id}; what is called again compiles again"
        self._write(text, {"event": "dropped", "id": overlay.id, "graphs": graphs}, logging.INFO)

    def _write(self, text: str, data: dict[str, object], level: int) -> None:
        if self._settings.rank != 0 and level < logging.WARNING:
            return
        try:
            self._write_as_asked(text, data, level)
        except Exception as error:  # noqa: BLE001 - a full disk or somebody's handler must not stop an import
            _print(f"[megacpp_overlays] {text} | {LOG} does not work: {type(error).__name__}: {error}")

    def _write_as_asked(self, text: str, data: dict[str, object], level: int) -> None:
        rank = f" rank {self._settings.rank}" if self._settings.rank else ""
        if self._settings.log is LogForm.LOGGING:
            logger.log(level, "%s", text)
        elif self._path is not None:
            row = self._json(data) if self._path.suffix in {".json", ".jsonl"} else f"[megacpp_overlays{rank}] {text}"
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{row}\n")
        else:
            _print(self._json(data) if self._settings.log is LogForm.JSON else f"[megacpp_overlays{rank}] {text}")

    def _json(self, data: dict[str, object]) -> str:
        import json  # noqa: PLC0415 - the default form does not need it

        return json.dumps({**data, "rank": self._settings.rank})


def _ids(records: Sequence[Record], decision: Decision) -> list[str]:
    return list(dict.fromkeys(record.overlay.id for record in records if record.decision is decision))


def _print(row: str) -> None:
    if sys.stderr is None:  # a windowless process
        return
    try:
        print(row, file=sys.stderr, flush=True)  # noqa: T201 - the one place that prints
    except (OSError, ValueError):  # closed, or a broken pipe
        logger.warning("%s", row)


def line(record: Record) -> str:
    """Return a decision as one line that needs no other line to be understood."""
    overlay = record.overlay
    version = f" {record.version}" if record.version else ""
    head = f"{record.decision.value}: {overlay.id} (pack {overlay.pack:02}) on {overlay.target.distribution}{version}"
    parts = [head, record.reason]
    if record.decision is Decision.ACTIVE:
        parts += [f"shape {record.shape}", f"replaced {', '.join(record.seams)}"]
        parts += [f"rebound {', '.join(record.rebound)}"] if record.rebound else []
    parts += [consequence(record)] if consequence(record) else []
    if record.decision in CAN_BE_DELETED:
        parts.append(f"delete when {overlay.retire_when}")
    if record.decision in CAN_BE_SWITCHED_OFF:
        parts.append(f"off: {overlay.variable}=off")
    return " | ".join(parts)


def consequence(record: Record) -> str:
    """Return what the decision means for the run; empty where upstream is fixed, absent or not known yet."""
    breaks = record.overlay.breaks
    verdict = record.finding.verdict if record.finding else None
    if record.decision is Decision.ACTIVE:
        return f"without it: {breaks}"
    if record.decision is Decision.GATED:
        return ""  # the reason says it, before it says what to do
    if isinstance(record.overlay, Gate) and record.decision is Decision.CONFLICT:
        return f"if this is the combination, {breaks}"
    if record.decision is Decision.CONFLICT and record.seams:
        return f"if what is there now does not repair it, {breaks}"
    if verdict is Verdict.BROKEN:
        return f"nothing is installed, so {breaks}"
    if record.decision is Decision.CONFLICT:
        return f"nothing is installed; if upstream is still broken, {breaks}"
    return ""


def as_dict(record: Record) -> dict[str, object]:
    """Return a decision as plain data with stable keys."""
    overlay, finding = record.overlay, record.finding
    return {
        "id": overlay.id,
        "pack": overlay.pack,
        "decision": record.decision.value,
        "verdict": record.verdict,
        "shape": finding.shape if finding else None,
        "distribution": overlay.target.distribution,
        "version": record.version,
        "target": str(overlay.target),
        "reason": record.reason,
        "evidence": [str(item) for item in finding.evidence] if finding else [],
        "source_sha256": record.source_sha256,
        "seams": list(record.seams),
        "rebound": list(record.rebound),
        "retire_when": overlay.retire_when,
        "variable": overlay.variable,
    }
