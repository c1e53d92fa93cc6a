"""Rehearsal of an unprepared upgrade: audits of this environment without the package's knowledge of the new release.

Four processes of this Python run: an audit with all knowledge of this package, an audit without the knowledge that is newer than
a given release, the command that proves the unproved parts, and an audit after it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacpp_overlays.errors import OverlayError
from megacpp_overlays.loader.decisions import FIRST
from megacpp_overlays.loader.settings import WITNESSES
from megacpp_overlays.model import Decision
from megacpp_overlays.source.knowledge import VARIABLE

NEEDED, NOT_NEEDED = Decision.ACTIVE.value, (Decision.RETIRED.value, Decision.ABSENT.value)


class RehearsalError(OverlayError):
    """Raised where a process of a rehearsal failed; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class RehearsalRow:
    """One overlay: the right decision, and the decisions without knowledge of the release."""

    overlay: str
    right: str
    """The decision with all knowledge of this package."""
    before: str
    """The decision on the day of the release."""
    after: str
    """The decision after `megacpp-overlays witness` has run."""
    reason: str
    """The reason of the last decision."""

    @property
    def is_wrong(self) -> bool:
        """Whether the last decision installs an overlay that is not needed, or leaves out a needed one as repaired or absent."""
        if self.right == NEEDED:
            return self.after in NOT_NEEDED
        return self.right in NOT_NEEDED and self.after == NEEDED


@dataclass(frozen=True, slots=True)
class UpgradeRehearsal:
    """A rehearsal of one release."""

    known_until: str
    release: str
    """The installed distribution and its version."""
    rows: tuple[RehearsalRow, ...]
    seconds: float
    """Duration of the `witness` command."""

    @property
    def wrong(self) -> tuple[RehearsalRow, ...]:
        """Rows whose decision is wrong after the proof."""
        return tuple(row for row in self.rows if row.is_wrong)

    def summary(self) -> str:
        """Return the rehearsal in one line."""
        needed = [row for row in self.rows if row.right == NEEDED]
        before, after = (Counter(getattr(row, when) for row in needed) for when in ("before", "after"))
        return (
            f"{self.release}, known until {self.known_until}: {len(needed)} overlays are needed; active on the day "
            f"{before[NEEDED]}, after `witness` {after[NEEDED]}; wrong {len(self.wrong)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def rehearse(
    known_until: str, distribution: str, witnesses: Path, environment: Mapping[str, str], workers: int
) -> UpgradeRehearsal:
    """Rehearse a release that is installed, or first on the path of an environment.

    Args:
        known_until: `DISTRIBUTION=VERSION`, see `source.knowledge`.
        distribution: the distribution whose overlays count.
        witnesses: an empty folder for witnesses.
        environment: variables of the processes.
        workers: number of overlays that are proved in parallel.

    Raises:
        RehearsalError: a process failed.
    """
    full = {**environment, WITNESSES: str(witnesses / "none")}
    forgetful = {**environment, WITNESSES: str(witnesses), VARIABLE: known_until}
    known = _decisions(full, distribution)
    right, before = by_overlay(known), by_overlay(_decisions(forgetful, distribution))
    began = time.monotonic()
    _said(["witness", "--workers", str(workers)], forgetful)
    seconds = time.monotonic() - began
    after = by_overlay(_decisions(forgetful, distribution))
    rows = tuple(
        RehearsalRow(name, right[name][0], before[name][0], *after[name])
        for name in right
        if name in before and name in after
    )
    version = next((each["version"] for each in known if each["version"]), "")
    return UpgradeRehearsal(known_until, f"{distribution} {version}".rstrip(), rows, round(seconds, 1))


def by_overlay(decisions: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the decision and the reason of each overlay: those of its part whose decision is first in `FIRST`."""
    found: dict[str, tuple[str, str]] = {}
    order = [each.value for each in FIRST]
    for each in decisions:
        decided = each["decision"], each["reason"]
        found[each["id"]] = min(found.get(each["id"], decided), decided, key=lambda one: order.index(one[0]))
    return found


def _decisions(environment: Mapping[str, str], distribution: str) -> list[dict[str, Any]]:
    """Return the decisions of an audit about the targets of a distribution."""
    decisions = json.loads(_said(["audit", "--json"], environment))["decisions"]
    return [each for each in decisions if each["distribution"] == distribution]


def _said(words: Sequence[str], environment: Mapping[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "megacpp_overlays", *words]
    done = subprocess.run(  # noqa: S603 - this Python, and words of ours
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in {0, 1}:
        raise RehearsalError(f"`megacpp-overlays {' '.join(words)}` ended with {done.returncode}: {done.stdout[-500:]}")
    return done.stdout


def lines(found: UpgradeRehearsal) -> list[str]:
    """Return a rehearsal as a Markdown table of the overlays that are needed or got another decision."""
    shown = [row for row in found.rows if row.right == NEEDED or row.right != row.after]
    table = ["| overlay | decision | on the day | after `witness` |", "|---|---|---|---|"]
    for row in shown:
        why = "" if row.after == row.right else f": {row.reason[:300]}".replace("|", "/").replace("\n", " ")
        mark = "**WRONG** " if row.is_wrong else ""
        table.append(f"| {row.overlay} | {row.right} | {row.before} | {mark}{row.after}{why} |")
    return [found.summary(), "", *table]
