"""Cut-off of recorded knowledge, for rehearsals: the newest release whose records this process uses.

MEGACPP_KNOWN_UNTIL=megatron-core=0.18.2 leaves out of every record the trees that are newer, or of no release, as on the day before
0.19.0. It removes knowledge and adds none, so it never installs an overlay that would not be installed without it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megacpp_overlays.errors import SettingsError

if TYPE_CHECKING:
    from packaging.version import Version

VARIABLE = "MEGACPP_KNOWN_UNTIL"
PUBLISHED = Path(__file__).with_name("published.json")


def has(distribution: str, trees: Iterable[str]) -> bool:
    """Return whether one of these trees is known: a release that is not newer than the cut-off, or any tree without a cut-off.

    Raises:
        SettingsError: see `until`.
    """
    last = until().get(distribution)
    if last is None:
        return True
    from packaging.version import Version  # noqa: PLC0415 - of rehearsals alone

    return any(Version(each) <= last for each in trees if " " not in each)  # the head of a branch has a space


@functools.cache
def until() -> dict[str, Version]:
    """Return the newest known release of each distribution with a cut-off; empty where there is no cut-off.

    Raises:
        SettingsError: the variable has another form, or names a distribution that is not known.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return {}
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415 - of rehearsals alone

    names = distributions()
    found: dict[str, Version] = {}
    for each in text.split(","):
        name, _, version = each.strip().partition("=")
        try:
            found[name] = Version(version)
        except InvalidVersion as error:
            raise SettingsError(f"{VARIABLE}={text}: {each.strip()!r} is not DISTRIBUTION=VERSION") from error
        if name not in names:
            raise SettingsError(f"{VARIABLE}={text}: {name} is not known; one of {', '.join(sorted(names))}")
    return found


def distributions() -> set[str]:
    """Return the distributions whose releases are known byte for byte."""
    return {each.partition(" ")[0] for each in published()}


@functools.cache
def published() -> dict[str, dict[str, str]]:
    """Return the digests of published releases in `PUBLISHED`; see `source.published`."""
    import json  # noqa: PLC0415 - not needed to arm

    found: dict[str, dict[str, str]] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return found
