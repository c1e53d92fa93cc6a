"""Pack 11: hybrid models with the fused linear cross entropy, compared with the same models without it.

They run on our stand-in for Megatron-LM dev, and on every real tree given with `--upstream-tree` that is broken. Each tree
has interpreters of its own, on the CPU, with the kernels of pack 10.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm_python
from hybrid_linear_ce_cases import CASES, RANKED
from places import HANG_S, ROOT, SUPPORT, measuring
from trees import STAND_INS
from warm_python import MEGATRON

from megacpp_overlays.feature_probes import hybrid_linear_ce as feature
from megacpp_overlays.overlays.hybrid_linear_ce import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree

OPTION = "--upstream-tree"
STAND_IN = STAND_INS["dev-linear-cross-entropy"]
CORE = Path("megatron/core")
TOLERANCE = 3e-6
"""Relative error, in the Frobenius norm, between two float32 models that order their sums differently: some roundings."""
OTHER_LOSS = "does not give the loss of the scaled logits for each label, as (batch, sequence)"

Report = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def reports() -> dict[object, dict[str, Any]]:
    return {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test here on the stand-in and on the given trees whose hybrid model is not wired."""
    if "hybrid" in metafunc.fixturenames:
        given = {f"upstream-{path.resolve().name}": path.resolve() for path in metafunc.config.getoption(OPTION)}
        every = {"stand-in": STAND_IN, **given}
        broken = {
            name: path
            for name, path in every.items()
            if path == STAND_IN or feature.probe(DirectoryTree(path)).shape in OVERLAY.replacements
        }
        metafunc.parametrize("hybrid", list(broken.values()), ids=list(broken), scope="module")


def environment(tree: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a process that takes its Megatron from a tree."""
    path = os.pathsep.join(map(str, (tree, ROOT, SUPPORT)))
    # One thread, so that sums are added in one order.
    fixed = {"PYTHONPATH": path, "MEGACPP_OVERLAYS_LOG": "logging", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed, **variables}


def start(tree: Path, *, measured: bool = True, **variables: str) -> warm_python.WarmProcess:
    command = [SUPPORT / "hybrid_linear_ce_report.py"]
    env = environment(tree, **(measuring() if measured else {}), **variables)
    return warm_python.start(command, env, after=MEGATRON)


def finish(process: warm_python.WarmProcess) -> dict[str, Any]:
    out, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, error
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture
def report(hybrid: Path, reports: dict[object, dict[str, Any]]) -> Report:
    """Return the report of `hybrid_linear_ce_report.py` on the tree of this test; equal runs happen once."""
    pytest.importorskip("triton")

    def run(**variables: str) -> dict[str, Any]:
        key = (hybrid, *sorted(variables.items()))
        if key not in reports:
            reports[key] = finish(start(hybrid, measured=not variables, **variables))
        return reports[key]

    return run


OFF = {"MEGACPP_OVERLAY_HYBRID_LINEAR_CE": "off"}


def test_without_the_overlay_the_first_step_fails(report: Report) -> None:
    found = report(**OFF)

    assert found["decision"] == "disabled"
    assert found["step"].startswith("UnboundLocalError")
    assert found["step with MTP"].startswith("TypeError")


def test_with_this_overlay_and_that_of_the_dispatcher_a_model_trains(report: Report) -> None:
    found = report()

    assert (found["decision"], found["dispatch"]) == ("active", "active"), found["reason"]
    assert (found["step"], found["step with MTP"]) == ("", "")


def test_without_the_overlay_of_the_dispatcher_a_step_needs_cuda(report: Report) -> None:
    found = report(MEGACPP_OVERLAY_HOPPER_FLCE_DISPATCH="off", HYBRID_ONLY="step")

    assert found["decision"] == "active"
    assert found["step"] == "AssertionError: CUDA is not available"


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_are_those_of_the_model_that_is_not_fused(report: Report, name: str) -> None:
    found = report()["cases"][name]

    assert found["loss"] < TOLERANCE
    assert found["gradient"] < TOLERANCE
    assert found["shape"] == [2, 12]


@pytest.mark.parametrize("name", CASES)
def test_the_output_layer_is_the_one_that_other_parts_look_for_by_name(report: Report, name: str) -> None:
    found = report()["cases"][name]

    assert found["layer"] == ["ColumnParallelLinear", feature.LAYER]


@pytest.mark.parametrize("name", CASES)
def test_names_parameters_and_sharded_state_are_the_same(report: Report, name: str) -> None:
    found = report()["cases"][name]

    assert found["names"]
    assert found["parameters"]
    assert found.get("sharded", True)


def test_checkpoints_load_from_one_into_the_other(report: Report) -> None:
    found = report()["checkpoints"]

    assert all(found.values()), found


def test_without_labels_logits_are_the_same_bits(report: Report) -> None:
    found = report()["without labels"]

    assert found.keys() == CASES.keys()
    assert all(found.values()), found


def test_heads_that_take_their_labels_from_the_tokens_train_alike(report: Report) -> None:
    found = report()["labels of MTP from tokens"]

    assert {"MTP", "MuP, MTP, tied"} <= found.keys()
    assert all(each["gradient"] < TOLERANCE for each in found.values()), found


def test_a_loss_mask_goes_through(report: Report) -> None:
    assert report()["masked"]["gradient"] < TOLERANCE


def test_a_model_that_is_not_fused_does_not_change_by_one_bit(report: Report) -> None:
    with_overlay, without = report()["without fusion"], report(**OFF)["without fusion"]

    assert len(set(without.values())) == len(without)
    assert with_overlay == without


def test_the_loss_comes_out_of_one_call_of_the_output_layer(report: Report) -> None:
    """A sharded weight is gathered before a module is called, and given back after it."""
    assert report()["calls"] == {"shapes": [[2, 12]]}


def test_arguments_may_be_given_by_position(report: Report) -> None:
    assert report()["positional"]


def test_an_inner_pipeline_stage_hands_on_hidden_states(report: Report) -> None:
    assert report()["inner stage"] == {"shape": [12, 2, 32], "has a layer": False}


def test_ignored_labels_have_no_loss(report: Report) -> None:
    assert report()["ignored"] == {"ignored": 0.0, "kept": True}


def test_the_cache_that_forward_keeps_on_the_model_stays_there(report: Report) -> None:
    assert report()["cache"]


def test_a_foreign_output_layer_is_refused_where_the_loss_is_fused(report: Report) -> None:
    found = report()["refusals"]

    assert "not the ColumnParallelLinear of upstream" in found["foreign"]
    assert found["foreign, not fused"] == ""


def test_mxfp8_and_the_fused_loss_exclude_each_other_with_a_way_out(report: Report) -> None:
    found = report()["refusals"]

    assert found["mxfp8"].startswith("ValueError")
    assert 'turn fp8_output_proj off, or choose "native"' in found["mxfp8"]
    assert found["mxfp8, not fused"] == ""


@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_share_the_vocabulary(
    hybrid: Path, reports: dict[object, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    if hybrid == STAND_IN:
        pytest.skip("the stand-in has one rank")
    key = (hybrid, "ranks")
    if key not in reports:
        requests = [{"rank": rank, "ranks": 2, "meet": str(tmp_path / "meet")} for rank in (0, 1)]
        started = [start(hybrid, HYBRID=json.dumps(each)) for each in requests]
        reports[key] = {"all": [finish(process)["cases"] for process in started]}

    for found in reports[key]["all"]:
        assert found[name]["loss"] < TOLERANCE
        assert found[name]["gradient"] < TOLERANCE
        assert found[name]["sharded"]


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        (
            "transformer/linear_cross_entropy.py",
            "reshape(columns.shape).t().contiguous()",
            "reshape(columns.shape)",
            OTHER_LOSS,
        ),
        (
            "transformer/linear_cross_entropy.py",
            "            hidden, weight, columns,",
            "            hidden * self.config.mup_output_mult, weight, columns,",
            OTHER_LOSS,
        ),
        ("fusions/fused_linear_cross_entropy.py", "        return loss\n", "        return loss / 2\n", OTHER_LOSS),
        (
            "fusions/fused_linear_cross_entropy.py",
            "labels, tp_group, reduction, ignore_index, sequence_parallel)\n",
            "labels.flip(0), tp_group, reduction, ignore_index, sequence_parallel)\n",
            OTHER_LOSS,
        ),
        (
            "models/common/language_module/language_module.py",
            "logits * self.config.mup_output_mult",
            "logits / self.config.mup_output_mult",
            "logits are not scaled by mup_output_mult",
        ),
        (
            "models/common/language_module/language_module.py",
            "        return loss\n",
            "        else:\n            loss = logits.sum(2).t()\n        return loss\n",
            "the loaded code does not behave so",
        ),
    ],
    ids=["layer", "scaled twice", "autograd function", "the caller", "scale", "loss"],
)
def test_code_that_looks_known_and_computes_something_else_stays_as_it_is(
    tmp_path: Path, run_python: Callable[..., Any], file: str, old: str, new: str, reason: str
) -> None:
    shutil.copytree(STAND_IN, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / CORE / file).read_text()
    assert text.count(old) == 1
    (tmp_path / CORE / file).write_text(text.replace(old, new))
    code = (
        "import megacpp_overlays;"
        "from megacpp_overlays.feature_probes import hybrid_linear_ce as feature;"
        "from megacpp_overlays.source.findings import broken;"
        "from megacpp_overlays.model import Evidence;"
        "feature.forms.finding = lambda *_: broken(feature.PLAIN_OUTPUT_LAYER, Evidence('as if read'));"  # past the probe, which knows none of these bodies
        "import megatron.core.models.hybrid.hybrid_model as m;"
        "r = next(r for r in megacpp_overlays.audit().records if r.overlay.pack == 11);"
        "print(r.decision.value, hasattr(m.HybridModel.forward, '__wrapped__'), r.reason)"
    )

    done = run_python(code, tmp_path, ROOT, after=MEGATRON, MEGACPP_OVERLAYS_LOG="logging", PYTHONWARNINGS="ignore")

    assert done.stdout.startswith("conflict False ")
    assert reason in done.stdout
