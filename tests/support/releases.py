"""Releases that a test is run on: the newest and one older in `make test`, all of them in `make test-all`.

What a probe says of each release is in packs/matrix.json, which `tests/upkeep/test_matrix_page.py` derives anew.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import pytest
from packaging.version import Version
from places import ROOT


@functools.cache
def newest(distribution: str = "megatron-core") -> str:
    """Return the newest release of a distribution that is supported: the one that locks/newest.txt pins."""
    found = re.search(rf"^{re.escape(distribution)}==(\S+)", (ROOT / "locks" / "newest.txt").read_text(), re.MULTILINE)
    assert found is not None, f"locks/newest.txt pins no {distribution}"
    return found[1]


OLDER = "0.18.2"
"""The older release of Megatron-Core of every day where a test has it: processes that have imported a release are shared."""


def daily(*versions: str, older: str | None = None) -> list[pytest.ParameterSet]:
    """Return parameters of releases: the newest of them and an older one are daily, and the others are `full`.

    Args:
        versions: all of them.
        older: the older one; without it `OLDER`, or the oldest where that is none of them.
    """
    chosen = older or (OLDER if OLDER in versions else min(versions, key=Version))
    kept = {max(versions, key=Version), chosen}
    assert kept <= set(versions), f"{older} is none of {', '.join(versions)}"
    return only(versions, kept)


def only(values: Iterable[object], kept: Iterable[object]) -> list[pytest.ParameterSet]:
    """Return parameters of which those that are kept are daily, and the others are `full`; a tuple is several values."""
    chosen = list(kept)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in chosen else pytest.mark.full
        )
        for value in values
    ]
