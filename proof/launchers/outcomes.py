"""A plugin of pytest that leaves the outcome of each test in the file that PROOF_OUTCOMES names, as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

_failed: dict[str, str] = {}
_seen: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how a test ended: `passed`, `skipped`, or the first line of its error."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr)
        _failed.setdefault(report.nodeid, text.strip().splitlines()[0])
    elif report.skipped or report.when == "call":
        _seen[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Write the file."""
    found = {"version": importlib.metadata.version("liger-kernel"), "failed": _failed}
    found |= {
        kind: sorted(name for name, outcome in _seen.items() if outcome == kind and name not in _failed)
        for kind in ("passed", "skipped")
    }
    Path(os.environ["PROOF_OUTCOMES"]).write_text(json.dumps(found, indent=1) + "\n")
