"""Stand-ins for a GPU that compiled programs need, on a host without one."""

from __future__ import annotations

from typing import Any

import kept_answers
import pytest

SHARED_OF_HOPPER = 227 * 1024
"""The shared memory that a program on Hopper may have, in bytes."""


def needs(script: str, *cases: str, **variables: str) -> dict[str, Any]:
    """Return the needs of the cases that a script of this folder compiled; skip the test where nothing can be compiled."""
    pytest.importorskip("triton")
    found = kept_answers.answer(script, *cases, TRITON_INTERPRET="0", **variables)
    if "obstacle" in found:
        pytest.skip(found["obstacle"])
    return found
