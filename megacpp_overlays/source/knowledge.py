"""Knowledge of a day that has passed, for rehearsals: which definitions had been read when a release was the newest.

MEGACPP_KNOWN_UNTIL=megatron-core=0.18.2 has probes of this process recognise nothing of that distribution that is not in
0.18.2 or an older release, as on the day before 0.19.0. It takes knowledge away and gives none, so nothing can be installed by
it that would not be. `knowledge.json` has the first release of each fingerprint; scripts/known_findings.py writes it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megacpp_overlays.errors import SettingsError

if TYPE_CHECKING:
    from packaging.version import Version

VARIABLE = "MEGACPP_KNOWN_UNTIL"
FILE = Path(__file__).with_name("knowledge.json")
UNREAD = "unread-"
"""Before a fingerprint that had not been read."""

recorded: set[str] | None = None
"""Gets every fingerprint that is taken, where somebody collects them."""


def as_known(digest: str) -> str:
    """Return a fingerprint as a table may have it, or as none has it where the process is not to know it."""
    if recorded is not None:
        recorded.add(digest)
    known = allowed()
    return digest if known is None or digest in known else f"{UNREAD}{digest}"


def is_asked_for_digests() -> bool:
    """Return whether fingerprints have to be taken that a quicker comparison would spare: to collect them, or to forget some."""
    return recorded is not None or allowed() is not None


@functools.cache
def allowed() -> frozenset[str] | None:
    """Return the fingerprints that this process knows; None for all of them.

    Raises:
        SettingsError: see `until`.
    """
    last = until()
    return frozenset(_known(_firsts(), last)) if last else None


@functools.cache
def until() -> dict[str, Version]:
    """Return the newest release of each distribution of which something is remembered; empty where nothing is forgotten.

    Raises:
        SettingsError: the variable has another form, or names a distribution that is not known.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return {}
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415 - of rehearsals alone

    firsts = _firsts()
    found: dict[str, Version] = {}
    for each in text.split(","):
        name, _, version = each.strip().partition("=")
        try:
            found[name] = Version(version)
        except InvalidVersion as error:
            raise SettingsError(f"{VARIABLE}={text}: {each.strip()!r} is not DISTRIBUTION=VERSION") from error
        if name not in firsts:
            raise SettingsError(f"{VARIABLE}={text}: {name} is not known; one of {', '.join(sorted(firsts))}")
    return found


def _firsts() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def _known(firsts: dict[str, dict[str, str]], last: dict[str, Version]) -> Iterator[str]:
    from packaging.version import Version  # noqa: PLC0415 - of rehearsals alone

    for distribution, found in firsts.items():
        newest = last.get(distribution)
        yield from (digest for digest, first in found.items() if newest is None or Version(first) <= newest)
