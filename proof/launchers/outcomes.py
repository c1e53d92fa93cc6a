"""A plugin of pytest that leaves the outcome of each test in the file that PROOF_OUTCOMES names, as JSON.

Where this project is armed, the decisions and calls of its overlays are there, too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

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
    found: dict[str, Any] = {"version": importlib.metadata.version("liger-kernel"), "failed": _failed}
    found |= {
        kind: sorted(name for name, outcome in _seen.items() if outcome == kind and name not in _failed)
        for kind in ("passed", "skipped")
    }
    if overlays := sys.modules.get("megacpp_overlays"):
        found["audit"] = overlays.audit().as_dict()["decisions"]
    Path(os.environ["PROOF_OUTCOMES"]).write_text(json.dumps(found, indent=1) + "\n")
