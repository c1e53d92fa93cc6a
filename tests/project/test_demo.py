"""The demo on real releases, in processes of its own: its measurements, its claims and its exit codes.

`.ci/run` starts the demo itself every day, and ends with it where a claim fails.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import HANG_S, ROOT

pytestmark = pytest.mark.upstream

EXEMPTION, LOSS = "float16-fp32-exemption", "liger-flce-none-backward"
CURRENT = ROOT / ".venv/bin/python"
"""The demo's own environment, whatever lane runs the tests: its releases need both overlays."""
LANES = {lane: ROOT / ".envs" / lane / "bin/python" for lane in ("spring-2026", "newest", "edge")}


@dataclass(frozen=True)
class Run:
    """One finished run of the demo."""

    code: int
    output: str
    report: dict[str, Any]

    def decision(self, overlay: str) -> str:
        return next(item["decision"] for item in self.report["audit"]["decisions"] if item["id"] == overlay)

    def exempt(self, column: str) -> list[tuple[str, bool]]:
        """Return the dtype of each exempt parameter, and whether any of its values changed."""
        return [(item["dtype"], item["changed"] > 0) for item in self.report[column]["exempt"].values()]

    def outcomes(self) -> list[str]:
        return [claim["outcome"] for claim in self.report["claims"]]


def run_demo(folder: Path, *launcher: str, python: Path = CURRENT, steps: int = 8, **variables: str) -> Run:
    path = folder / "report.json"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEGACPP_OVERLAY")}
    done = subprocess.run(
        [python, *launcher, ROOT / "examples/train_tiny.py", "--device", "cpu", f"--steps={steps}", f"--json={path}"],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        cwd=folder,
    )
    assert path.exists(), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Run(done.returncode, done.stdout, json.loads(path.read_text()))


@pytest.fixture(scope="module")
def current(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_demo(tmp_path_factory.mktemp("current"))


@pytest.fixture(scope="module")
def switched_off(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_demo(tmp_path_factory.mktemp("off"), MEGACPP_OVERLAYS="off", steps=2)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return run_demo(tmp_path_factory.mktemp("ranks"), *launcher)


@pytest.mark.full
def test_both_overlays_are_active_and_every_claim_holds(current: Run) -> None:
    assert (current.decision(EXEMPTION), current.decision(LOSS)) == ("active", "active")
    assert (current.code, current.outcomes()) == (0, ["ok", "ok", "ok"])


@pytest.mark.full
def test_the_output_starts_with_the_audit(current: Run) -> None:
    audit, measurements = current.output.index("fingerprint"), current.output.index("Exempt parameters")

    assert audit < measurements
    assert EXEMPTION in current.output[audit:measurements]
    assert LOSS in current.output[audit:measurements]


@pytest.mark.full
def test_all_seven_parameters_of_the_contract_are_compared(current: Run) -> None:
    names = {name.rpartition(".")[2] for name in current.report["off"]["exempt"]}

    assert names == {"dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"}


@pytest.mark.full
def test_upstream_rounds_every_exempt_parameter_and_the_overlay_keeps_every_bit(current: Run) -> None:
    assert set(current.exempt("off")) == {("bfloat16", True)}
    assert set(current.exempt("on")) == {("float32", False)}


@pytest.mark.full
@pytest.mark.parametrize("role", ["input", "weight"])
def test_upstream_gets_the_masked_gradient_wrong_and_the_overlay_right(current: Run, role: str) -> None:
    assert current.report["off"]["gradient_error"][role] > 0.1
    assert current.report["on"]["gradient_error"][role] < 1e-5


@pytest.mark.full
def test_the_model_learns(current: Run) -> None:
    first, *_, last = current.report["losses"]

    assert len(current.report["losses"]) == 8
    assert last < first - 1


@pytest.mark.full
def test_switched_off_it_names_the_broken_claims_and_still_exits_cleanly(switched_off: Run) -> None:
    assert switched_off.code == 0
    assert (switched_off.decision(EXEMPTION), switched_off.decision(LOSS)) == ("disabled", "disabled")
    assert switched_off.outcomes()[:2] == ["broken", "broken"]
    assert "overlay disabled" in switched_off.output


@pytest.mark.full
def test_switched_off_both_columns_are_upstream(switched_off: Run) -> None:
    assert switched_off.report["on"] == switched_off.report["off"]
    assert set(switched_off.exempt("on")) == {("bfloat16", True)}


@pytest.mark.full
def test_the_same_file_runs_on_two_ranks_and_only_the_first_speaks(two_ranks: Run) -> None:
    assert (two_ranks.code, two_ranks.report["world_size"]) == (0, 2)
    assert two_ranks.outcomes() == ["ok", "ok", "ok"]
    assert two_ranks.output.count("fingerprint") == 1


@pytest.mark.full
def test_the_second_rank_brings_data_of_its_own(current: Run, two_ranks: Run) -> None:
    # Same weights, same first batch on rank 0: a loss that is the same would mean that rank 1 counts for nothing.
    assert two_ranks.report["losses"][0] != pytest.approx(current.report["losses"][0], abs=1e-4)
    assert two_ranks.report["on"]["exempt"] == current.report["on"]["exempt"]


@pytest.mark.full
def test_an_odd_rank_stops_the_demo_before_step_1_and_one_table_says_why(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEGACPP_OVERLAY")}

    done = subprocess.run(
        [CURRENT, *launcher, ROOT / "examples/odd_rank.py", "--device", "cpu"],
        env=clean,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        cwd=tmp_path,
    )

    assert done.returncode == 1
    table = done.stdout.partition("fingerprint")[2]
    assert LOSS in table
    assert "MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD" in table
    assert "Exempt parameters" not in table


@pytest.mark.full
@pytest.mark.parametrize(
    ("lane", "loss_decision"), [("spring-2026", "active"), ("newest", "retired"), ("edge", "retired")]
)
def test_another_lane_shows_the_overlays_of_its_releases(tmp_path: Path, lane: str, loss_decision: str) -> None:
    assert LANES[lane].exists(), f"there is no {LANES[lane]}: run `make setup`"

    run = run_demo(tmp_path, python=LANES[lane], steps=4)

    assert (run.code, run.outcomes()) == (0, ["ok", "ok", "ok"])
    assert (run.decision(EXEMPTION), run.decision(LOSS)) == ("active", loss_decision)
    assert (run.report["off"]["gradient_error"]["input"] > 0.1) is (loss_decision == "active")


@pytest.mark.parametrize(
    ("decision", "dtype", "changed", "outcome"),
    [
        ("active", "float32", 0, "ok"),
        ("active", "float32", 1, "FAILED"),
        ("active", "bfloat16", 0, "FAILED"),
        ("conflict", "bfloat16", 4, "FAILED"),
        ("disabled", "bfloat16", 4, "broken"),
        ("retired", "bfloat16", 4, "FAILED"),
    ],
)
def test_a_lost_parameter_fails_the_demo_unless_its_overlay_was_switched_off(
    monkeypatch: pytest.MonkeyPatch, decision: str, dtype: str, changed: int, outcome: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import demo_report

    measured = SimpleNamespace(
        exempt={"D": SimpleNamespace(dtype=dtype, values=4, changed=changed)},
        gradient_error={"input": 0.0, "weight": 0.0},
    )
    claims = demo_report.judge({EXEMPTION: decision, LOSS: "active"}, measured, [5.0, 4.0])

    assert [claim.outcome for claim in claims] == [outcome, "ok", "ok"]


@pytest.mark.parametrize(("error", "losses"), [(1.0, [5.0, 4.0]), (0.0, [4.0, 5.0])], ids=["gradient", "loss"])
def test_a_wrong_gradient_or_a_rising_loss_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, error: float, losses: list[float]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import demo_report

    measured = SimpleNamespace(exempt={}, gradient_error={"input": error, "weight": 0.0})
    claims = demo_report.judge({EXEMPTION: "active", LOSS: "active"}, measured, losses)

    assert [claim.outcome for claim in claims].count("FAILED") == 1
