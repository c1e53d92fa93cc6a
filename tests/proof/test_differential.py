"""Training steps of real Megatron models in ranks over gloo: with all overlays as without, where stock is right, and right where it is not.

The table is `proof/differential/table.py`: a row is a configuration, and overlays are in it by being called.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT

PYTHON = ROOT / ".envs/mamba3-pinned/bin/python"
PROGRAM = ROOT / "proof/differential/run.py"
RESULTS = ROOT / "proof/results"
Found = dict[str, Any]
SAME = {"the same bits", "the same but for rounding"}
GOOD = {*SAME, "stock wrong, overlays right"}
BEYOND = {
    "gdn-capture-gates": "packed rows of gated delta nets are for the kernels of fla alone",
    "mla-rope-head-blocks": "without transformer_engine a configuration refuses to have rotary kernels fused",
    "fsdp-optimizer-under-update": "for optimizers of one's own: no training step of Megatron-Core calls it",
    "scheduler-restore": "a launcher restores a schedule, and no training step does",
    "cpu-offload-reload": "no row loads weights into a model whose optimizer is offloaded",
    "trainer-moe-aux-loss": "no row has a Trainer",
    "cudnn-sdpa-query-gradient": "no row has attention of transformers",
    "liger-glm4v-norms": "no row has a model of transformers",
    "compile-budget-dropout": "no row compiles with a budget",
    "dcp-fresh-optimizer-state": "no row saves by torch's distributed checkpoints",
    "dcp-frozen-optimizer-state": "no row loads by torch's distributed checkpoints",
    "mix-order-reduction-views": "no row compiles for a GPU",
    "loss-parallel-log-softmax": "no row has losses of DTensors",
    "mla-softmax-scale": "no row has softmax_scale",
    "muon-gated-fc1": "no row trains with Muon",
    "layerwise-norm-groups": "no row has a layer-wise optimizer",
    "expert-gradient-groups": "the releases of the table are repaired",
    "expert-grad-norm": "the releases of the table are repaired",
    "fsdp-lone-rank-gradients": "no row trains with Megatron-FSDP",
    "fsdp-decoupled-grad-sums": "no row trains with Megatron-FSDP",
    "fsdp2-per-token-loss": "no row trains with Torch FSDP2",
    "fsdp-fused-accumulation": "no row trains with Megatron-FSDP",
    "precision-aware-reload": "no row has Transformer Engine",
    "liger-flce-strided-gradients": "no row has a transposed output layer in Liger's loss",
    "fsdp-reduced-twice": "no row trains with Megatron-FSDP",
    "expert-rng-resume": "rows write no checkpoint of a launcher",
    "sft-end-of-turn-loss": "rows have tokens of their own, and no dataset",
    "loss-mask-cache": "rows have tokens of their own, and no dataset",
    "qk-clip-negative-head": "largest logits are Transformer Engine's, and no row clips",
}
"""Overlays that no row can call, and why."""
CALLED_WITH = {"gdn-capture-gates": "fla", "mla-rope-head-blocks": "transformer_engine"}
"""Those of them that rows do call where a package is installed."""


def beyond(found: Found) -> set[str]:
    """Return the overlays that no row can call in the environment of a run."""
    return {name for name in BEYOND if name not in CALLED_WITH or CALLED_WITH[name] in found["not installed"]}


COMBINED = {
    *("Mamba-2, attention, gated delta net, experts, one rank", "sparse attention, one rank", "four microbatches"),
    *("sparse attention, loss of the indexer over chosen keys", "two models in turn", "tied and frozen weights"),
    *("latent attention, subclasses", "hybrid, subclasses", "TP, latent attention, subclasses", "bfloat16"),
    *("float16 with loss scaling", "TP, hybrid", "TP with SP, hybrid", "TP with SP, latent attention", "CP, hybrid"),
    *("TP with SP, sparse attention", "CP, latent attention", "PP, hybrid", "PP, predictions"),
    *("TP with SP, PP, padding mask", "TP with SP, EP", "TP, CP", "TP with SP, CP, hybrid"),
    *("TP", "TP with SP", "packed row", "TP, attention sinks, norms of queries"),
    "DP, distributed optimizer, a checkpoint between steps",
}
"""Rows that combine the features of other rows, have another dtype, or are part of another row: only in the full tests."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, grid_size: str) -> Found:
    """Return the results of rows of the table in a fresh run."""
    path = tmp_path_factory.mktemp("differential") / "found.json"
    names = [each["row"] for each in json.loads((RESULTS / "differential-cpu.json").read_text())["rows"]]
    assert set(names) >= COMBINED
    words = [each for each in names if each not in COMBINED] if grid_size == "few" else ["--full"]
    done = subprocess.run(
        [PYTHON, "-W", "ignore", PROGRAM, "--json", path, *words], capture_output=True, text=True, timeout=HANG_S
    )
    assert path.exists(), done.stderr[-4000:]
    read: Found = json.loads(path.read_text())
    return read


def by_row(found: Found) -> dict[str, Found]:
    return {each["row"]: each for each in found["rows"]}


def test_overlays_are_right_in_every_row(found: Found) -> None:
    """Bits of stock, or rounding of the row's own dtype; and the truth where stock is not."""
    bad = {name: each for name, each in by_row(found).items() if each["outcome"] not in GOOD}
    assert not bad


def test_stock_is_right_somewhere_and_wrong_somewhere(found: Found) -> None:
    """Otherwise nothing would be compared: truth, ranks or overlays would be others than they are said to be."""
    outcomes = [each["outcome"] for each in found["rows"]]
    assert len([each for each in outcomes if each in SAME]) > len(outcomes) / 3
    assert outcomes.count("stock wrong, overlays right") > 5


def test_every_active_overlay_is_called_that_can_be(found: Found) -> None:
    """A new one that no row calls needs a row."""
    assert set(found["never called"]) <= beyond(found)


def test_one_rank_without_parallelism_has_the_bits_of_stock(found: Found) -> None:
    rows = by_row(found)
    for name in ("GPT with experts, one rank", "latent attention, one rank", "recompute, full", "eval", "no_grad"):
        assert rows[name]["outcome"] == "the same bits", name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("differential-*.json")), ids=lambda path: path.stem)
def test_kept_receipts_hold_and_their_page_says_the_same(path: Path) -> None:
    receipts: Found = json.loads(path.read_text())
    assert receipts["holds"]
    assert all(each["outcome"] in GOOD for each in receipts["rows"])
    assert set(receipts["never called"]) <= beyond(receipts)
    assert ("NCCL" in receipts["over"]) == ("gpu" in path.stem)
    text = path.with_suffix(".md").read_text()
    for each in receipts["rows"]:
        assert f"| {each['row']} | {each['ranks']} | {each['outcome']} |" in text


def test_receipts_of_a_cpu_are_kept_for_every_row(modules_of_proof: None) -> None:
    from differential.table import ROWS

    receipts: Found = json.loads((RESULTS / "differential-cpu.json").read_text())
    assert [each["row"] for each in receipts["rows"]] == [row.name for row in ROWS]


def test_rows_have_names_of_their_own(modules_of_proof: None) -> None:
    """A receipt, and a run of one row, go by the name."""
    from differential.table import ROWS

    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


@pytest.fixture
def judge(tmp_path: Path, modules_of_proof: None) -> Callable[..., Found]:
    """Judge a made-up row: the true value is 1.0, and each side has the given value, or ends with the given error."""
    import torch
    from differential.judged import judged
    from differential.table import ROWS

    def judge(**sides: float | str) -> Found:
        for side, value in {"reference": 1.0, "rounding": 1.0, **sides}.items():
            if isinstance(value, str):
                (tmp_path / f"{side} 0.error.0").write_text(value)
                continue
            numbers = {"loss": torch.tensor(value, dtype=torch.float64)}
            torch.save({"numbers": numbers, "apart": 0.0, "calls": {}, "seconds": 0.0}, tmp_path / f"{side} 0.pt")
        return judged(tmp_path, ROWS[0]).as_dict()

    return judge


@pytest.mark.parametrize(
    ("stock", "ours", "outcome"),
    [
        (1.0, 1.0, "the same bits"),
        (1.0, 1.0 + 1e-6, "the same but for rounding"),
        (1.1, 1.0, "stock wrong, overlays right"),
        ("it ended", 1.0, "stock wrong, overlays right"),
        (1.0, 1.1, "STOCK RIGHT, OVERLAYS WRONG"),
        (1.0, "it ended", "STOCK RIGHT, OVERLAYS WRONG"),
        (1.1, 1.1, "BOTH WRONG"),
        (1.0, float("nan"), "STOCK RIGHT, OVERLAYS WRONG"),
        ("it ended", "it ended", "BOTH WRONG"),
    ],
)
def test_a_row_is_judged_by_the_truth(judge: Callable[..., Found], stock: Any, ours: Any, outcome: str) -> None:
    assert judge(stock=stock, overlays=ours)["outcome"] == outcome


def test_the_error_that_ends_a_side_is_reported(judge: Callable[..., Found]) -> None:
    assert judge(stock="RuntimeError: sizes differ\nmore", overlays=1.0)["error"] == "stock: RuntimeError: sizes differ"


def test_more_rounding_of_one_rank_allows_more(judge: Callable[..., Found]) -> None:
    assert judge(rounding=1.0 + 1e-3, stock=1.0, overlays=1.0 + 2e-3)["outcome"] == "the same but for rounding"


def test_a_row_without_a_truth_is_an_error(judge: Callable[..., Found]) -> None:
    with pytest.raises(RuntimeError, match="has no reference: it ended"):
        judge(reference="it ended", stock=1.0, overlays=1.0)
