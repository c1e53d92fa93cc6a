"""`make proof-cpu` in its quick form, for real: the Trainer of transformers, the released Liger, and Liger's own tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from places import HANG_S, ROOT

pytestmark = pytest.mark.upstream

PYTHON = ROOT / ".envs/proof/bin/python"
ARCHIVES = ROOT / ".cache/proof"


class Proof(NamedTuple):
    """One finished proof."""

    code: int
    output: str
    found: dict[str, Any]
    folder: Path

    def runs(self) -> dict[str, Any]:
        runs: dict[str, Any] = self.found["measured"]["trainer"]["runs"]
        return runs


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    assert PYTHON.exists(), f"there is no {PYTHON}: run `make setup`"
    assert list(ARCHIVES.glob("*.tar.gz")), f"there is nothing in {ARCHIVES}: run `make setup`"
    folder = tmp_path_factory.mktemp("proof")
    files = ["--json", folder / "cpu.json", "--write", folder / "cpu.md", "--plot", folder / "cpu.svg"]
    done = subprocess.run(
        [PYTHON, "-W", "ignore", ROOT / "proof/run.py", "--quick", *files],
        env={**os.environ, "MEGACPP_OVERLAYS": "off"},  # the proof must not depend on a switch of the shell
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert (folder / "cpu.json").exists(), done.stdout + done.stderr
    return Proof(done.returncode, done.stdout, json.loads((folder / "cpu.json").read_text()), folder)


@pytest.mark.full
def test_every_claim_holds_except_those_that_upstream_fails_itself(proof: Proof) -> None:
    said = {claim["id"]: (claim["outcome"], claim["figure"]) for claim in proof.found["claims"]}

    assert {claim: outcome for claim, (outcome, _) in said.items() if outcome != "HOLDS"} == {
        "liger-tests-rest": "UPSTREAM"
    }, proof.output
    assert (proof.code, proof.found["problems"]) == (0, [])


@pytest.mark.full
def test_it_reports_its_progress(proof: Proof) -> None:
    lines = proof.output.splitlines()
    begin = [line.split("]")[0] for line in lines if line.startswith("[")]

    assert begin == [f"[{number}/9" for number in range(1, 10)] + ["[1/2", "[2/2"]
    assert lines[-2] == "11 HOLDS, 0 FAILS, 1 UPSTREAM"


@pytest.mark.full
def test_stock_learns_nothing_and_with_the_overlay_the_same_script_learns(proof: Proof) -> None:
    stock, ours, true = (proof.runs()[f"prompts, {way}"] for way in ("stock", "overlay", "PyTorch"))

    assert set(stock["norms"]) == {0.0}
    assert ours["losses"] == pytest.approx(true["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(true["norms"], rel=1e-5)
    assert ours["losses"][-1] < ours["losses"][0] - 0.5


@pytest.mark.full
def test_stock_and_switched_off_have_the_same_bits(proof: Proof) -> None:
    stock, off = (proof.runs()[f"weights, {way}"] for way in ("stock", "overlay off"))

    assert (off["losses"], off["norms"]) == (stock["losses"], stock["norms"])
    assert off["norms"] != proof.runs()["weights, overlay"]["norms"]


@pytest.mark.full
def test_liger_s_own_tests_run_against_the_broken_release(proof: Proof) -> None:
    found = proof.found["measured"]["liger-tests"]

    assert {found[way]["version"] for way in ("without", "with")} == {"0.8.1"}
    assert len(found["with"]["passed"]) == len(found["without"]["passed"]) + 4


@pytest.mark.full
def test_page_and_plot_have_the_results(proof: Proof) -> None:
    page, plot = ((proof.folder / name).read_text() for name in ("cpu.md", "cpu.svg"))

    assert page.count("| HOLDS |") == 11
    assert page.count("| UPSTREAM |") == 1
    assert "Quick: fewer steps" in page
    assert plot.count("<polyline") == 6
