"""The benchmark of Trainer steps runs on a CPU, reduced, and its page and plot can be made again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from places import HANG_S, ROOT

pytestmark = pytest.mark.upstream

FOLDER = ROOT / "benchmarks" / "trainer_step"
PROOF = ROOT / ".envs" / "proof" / "bin" / "python"
LIGER, OVERLAY = "Liger", "Liger, overlay"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reduced run left its numbers, page and plot."""
    archive = ROOT / ".cache" / "proof" / "liger_kernel-0.8.5.tar.gz"
    if not (PROOF.exists() and archive.exists()):
        pytest.skip("needs .envs/proof and the archive of liger-kernel: make setup")
    folder = tmp_path_factory.mktemp("trainer")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    source = folder / "liger_kernel-0.8.5" / "src"
    outputs = [word for name in ("json", "write", "plot") for word in (f"--{name}", str(folder / name))]
    words = ["--device", "cpu", "--quick", "--ways", LIGER, OVERLAY, *outputs]
    done = subprocess.run(
        [PROOF, "-W", "ignore", FOLDER / "run.py", *words],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "[2/2] Liger, overlay: steps with 25% labelled" in done.stderr
    return folder


@pytest.mark.full
def test_the_overlay_trains_as_liger_does(kept: Path) -> None:
    found = json.loads((kept / "json").read_text())

    assert found["versions"]["liger-kernel"] == "0.8.5"
    assert set(found["ways"][LIGER]) == set(found["ways"][OVERLAY]) == {"0.25"}
    for share, stock in found["ways"][LIGER].items():
        row = found["ways"][OVERLAY][share]
        assert row["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert row["norms"] == pytest.approx(stock["norms"], rel=1e-4)
        assert min(row["step"], row["alone"]) > 0


@pytest.mark.full
def test_page_and_plot_say_every_way(kept: Path) -> None:
    page, plot = (kept / "write").read_text(), (kept / "plot").read_text()

    for way in (LIGER, OVERLAY):
        assert f"| 25% | {way} |" in page
        assert f">{way}</text>" in plot
    ElementTree.fromstring(plot)


def test_the_kept_page_is_that_of_the_kept_numbers(tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results"
    command = [sys.executable, str(FOLDER / "page.py"), str(results / "trainer_step.json")]

    subprocess.run(
        [*command, "--write", str(tmp_path / "md"), "--plot", str(tmp_path / "svg")],
        check=True,
        stdout=subprocess.DEVNULL,
    )

    assert (tmp_path / "md").read_text() == (results / "trainer_step.md").read_text()
    assert (tmp_path / "svg").read_text() == (results / "trainer_step.svg").read_text()
