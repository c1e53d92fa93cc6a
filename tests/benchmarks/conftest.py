"""Fixtures of tests of benchmarks: their modules, which are no package."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from places import ROOT

BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture(autouse=True)
def modules_of_benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tests import the modules of `benchmarks`, and remove them from `sys.modules` afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(BENCHMARKS):
            del sys.modules[name]
