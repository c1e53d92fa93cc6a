"""Releases that a test is run on: the newest in `make test`, and one older where something differs; all of them in `make test-all`.

The verdict on each release is in packs/matrix.json, which `tests/upkeep/test_matrix_page.py` derives anew.
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


def daily(*versions: str, older: str | None = None) -> list[pytest.ParameterSet]:
    """Return parameters of releases: the newest of them is daily, an older one where it is named, and the others are `full`.

    Args:
        versions: all of them.
        older: a release whose code has another shape than that of the newest. Verdicts of probes on it are in packs/matrix.json.
    """
    kept = {max(versions, key=Version), *filter(None, [older])}
    assert kept <= set(versions), f"{older} is none of {', '.join(versions)}"
    return only(versions, kept)


def weekly(*versions: str) -> list[pytest.ParameterSet]:
    """Return parameters of releases that are all `full`: a row of the differential test proves the newest one right every day."""
    return only(versions, ())


def only(values: Iterable[object], kept: Iterable[object]) -> list[pytest.ParameterSet]:
    """Return parameters of which those that are kept are daily, and the others are `full`; a tuple is several values."""
    chosen = list(kept)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in chosen else pytest.mark.full
        )
        for value in values
    ]
