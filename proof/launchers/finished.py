"""A plugin of pytest that writes how each test ended as soon as it has: a line of JSON in the file that PROOF_FINISHED names.

Finished tests are in the file however the process ends. After PROOF_SECONDS no further test is begun. Where this project is
armed, the decisions and calls of its overlays are the last line.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FILE = Path(os.environ["PROOF_FINISHED"])  # tests of others change the environment
BEGAN = time.monotonic()
SECONDS = float(os.environ["PROOF_SECONDS"])
HERE = f"{Path.cwd()}/"
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_outcome: dict[str, tuple[str, str]] = {}


def said(longrepr: object) -> str:
    """Return the first line of an error, without the parts that differ between processes: folders and addresses."""
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash else longrepr[-1] if isinstance(longrepr, tuple) else str(longrepr)
    lines = [line for line in text.strip().splitlines() if line.strip()] or ["no words"]
    last = next((line[1:].strip() for line in reversed(lines) if line.startswith("E ")), lines[0])
    return ADDRESS.sub("0x...", last.replace(HERE, ""))


def write(**found: Any) -> None:
    """Add a line."""
    with FILE.open("a") as file:
        file.write(json.dumps(found) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write which file has no tests on this host, and why."""
    if report.failed or report.skipped:
        write(left_out=report.nodeid, why=said(report.longrepr))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the collected tests."""
    write(collected=[item.nodeid for item in session.items])
    gc.collect()
    gc.freeze()  # imported objects need not be scanned after each test


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write the test that begins: a process can end in it."""
    write(began=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst of a test's phases."""
    known = _outcome.get(report.nodeid, ("", ""))
    if report.failed and known[0] != "failed":
        _outcome[report.nodeid] = ("failed", said(report.longrepr))
    elif known[0] != "failed" and (report.skipped or report.when == "call"):
        _outcome[report.nodeid] = (report.outcome, "")


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write how a test ended."""
    outcome, error = _outcome.pop(nodeid, ("failed", "it has no outcome"))
    write(ended=nodeid, outcome=outcome, error=error)
    sweep()


def sweep() -> None:
    """Free the objects that a test leaves behind before the next one.

    Containers of Megatron's tests destroy its process groups when they are freed. Without a sweep the number of allocations decides when,
    which may be in the middle of another test.
    """
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Begin no further test when the time is over."""
    found = yield
    if time.monotonic() - BEGAN > SECONDS:
        item.session.shouldstop = "the time is over"
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write whether time was over, and the decisions and calls of overlays."""
    overlays = sys.modules.get("megacpp_overlays")
    decisions = overlays.audit().as_dict()["decisions"] if overlays else None
    write(stopped="limit" if session.shouldstop else None, audit=decisions)
