"""Paths of the checkout, and settings of processes of tests: a limit, and whether their coverage is measured."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
"""Helpers, which processes of their own find on their path."""
WHEELS = ROOT / ".cache" / "wheels"
"""Wheels of every supported release, fetched by `make wheels` with their hashes checked."""
FINDINGS = ROOT / ".cache" / "findings"
"""Findings of earlier probes, by their code and by the texts that they asked for."""
HANG_S = 3600.0
"""No test measures how busy its host is: this limit only ends processes that would never end."""
_OF_COVERAGE = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
_measuring: dict[str, str] = {}


def measure_no_child() -> None:
    """Remove the variables from the environment that make every new Python measure its coverage.

    On Python 3.12 branches are measured by tracing every line of every library: importing torch then takes twice as long, and
    pip ten times. So a process is measured where no other test runs its lines of the package: in the rooms that
    `tests/conftest.py` names, where it is copied from one that has imported torch, and where a test gives it the variables of
    `measuring`.
    """
    _measuring.update({name: os.environ.pop(name) for name in _OF_COVERAGE if name in os.environ})


def measuring() -> dict[str, str]:
    """Return the variables with which a process measures its coverage; none where that of nothing is measured."""
    return dict(_measuring)
