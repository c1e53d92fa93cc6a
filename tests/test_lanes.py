"""The same audit on three locked environments: the true mix of active and retired on real packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.upstream

LANES = {
    "old": ROOT / ".envs/old/bin/python",
    "current": Path(sys.executable),
    "newest": ROOT / ".envs/newest/bin/python",
}

EXPECTED = {
    ("old", "float16-fp32-exemption"): ("active", "megatron-core 0.16.1"),
    ("current", "float16-fp32-exemption"): ("active", "megatron-core 0.19.2"),
    ("newest", "float16-fp32-exemption"): ("active", "megatron-core 0.19.2"),
    ("old", "liger-flce-none-backward"): ("active", "liger-kernel 0.6.5"),
    ("current", "liger-flce-none-backward"): ("active", "liger-kernel 0.8.1"),
    ("newest", "liger-flce-none-backward"): ("retired", "liger-kernel 0.8.5"),
}


def audit(lane: str, **variables: str) -> tuple[int, dict[str, dict[str, str]], str]:
    """Run the pre-flight in a lane; return its exit code, its decisions by id, and what it wrote on stderr."""
    python = LANES[lane]
    assert python.exists(), f"there is no {python}: run `make setup`"
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "megacpp_overlays", "audit", "--json"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    decisions = {item["id"]: item for item in json.loads(done.stdout)["decisions"]} if done.stdout else {}
    return done.returncode, decisions, done.stderr


@pytest.fixture(scope="module")
def audits() -> dict[str, tuple[int, dict[str, dict[str, str]], str]]:
    return {lane: audit(lane) for lane in LANES}


@pytest.mark.parametrize(("lane", "overlay"), EXPECTED, ids=[f"{lane}-{overlay}" for lane, overlay in EXPECTED])
def test_the_decision_on_a_locked_environment(
    audits: dict[str, tuple[int, dict[str, dict[str, str]], str]], lane: str, overlay: str
) -> None:
    code, decisions, stderr = audits[lane]
    decision, target = EXPECTED[lane, overlay]

    found = decisions[overlay]
    assert (found["decision"], f"{found['distribution']} {found['version']}") == (decision, target), found["reason"]
    assert code == 0, stderr


@pytest.mark.parametrize("lane", LANES)
def test_every_decision_has_its_line(audits: dict[str, tuple[int, dict[str, dict[str, str]], str]], lane: str) -> None:
    _, decisions, stderr = audits[lane]

    for overlay, found in decisions.items():
        assert f"[megacpp_overlays] {found['decision']}: {overlay} (pack " in stderr


@pytest.mark.parametrize("lane", LANES)
def test_what_is_due_for_deletion_is_what_the_audit_calls_retired(
    audits: dict[str, tuple[int, dict[str, dict[str, str]], str]], lane: str
) -> None:
    retired = [overlay for overlay, found in audits[lane][1].items() if found["decision"] == "retired"]

    done = subprocess.run(
        [LANES[lane], "-m", "megacpp_overlays", "ledger", "--due"], capture_output=True, text=True, check=False, cwd="/"
    )

    assert done.returncode == bool(retired)
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if ":" in line] == retired


def test_observe_installs_nothing_and_reports_the_same_verdicts(
    audits: dict[str, tuple[int, dict[str, dict[str, str]], str]],
) -> None:
    code, observed, _ = audit("current", MEGACPP_OVERLAYS="observe")

    assert code == 0
    assert {item["decision"] for item in observed.values()} <= {"disabled", "retired", "absent"}
    assert {id_: item["verdict"] for id_, item in observed.items()} == {
        id_: item["verdict"] for id_, item in audits["current"][1].items()
    }


def test_off_is_off() -> None:
    _, decisions, _ = audit("current", MEGACPP_OVERLAYS="off")

    assert {item["decision"] for item in decisions.values()} == {"disabled"}


def test_importing_the_targets_does_not_initialise_cuda() -> None:
    code = """
import megacpp_overlays, importlib
for overlay in megacpp_overlays.lane.current().overlays:
    importlib.import_module(overlay.target.module)
import torch
assert {r.decision.value for r in megacpp_overlays.audit().records} == {"active"}, str(megacpp_overlays.audit())
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
