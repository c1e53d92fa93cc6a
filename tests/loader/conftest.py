"""Every module of these tests has a small heap."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def heap_of_the_module(small_heap: None) -> None:
    """Leave out what was there before."""
