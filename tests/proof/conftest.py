"""Fixtures of tests of proofs: the modules of `proof/`, which are no package, and the receipts that are kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from places import ROOT


@pytest.fixture(autouse=True)
def modules_of_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests import the modules that `proof/run.py` imports."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "proof")


@pytest.fixture
def kept() -> dict[str, Any]:
    """Return the receipts of the page, to be read or changed."""
    found: dict[str, Any] = json.loads((ROOT / "proof/results/cpu.json").read_text())
    return found
