"""The portable entry of pack 10 against float64, on the CPU: its Triton kernels run in the interpreter.

Cases go through the autograd function of our stand-in for Megatron-LM dev, or of a real tree that is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from places import HANG_S, SUPPORT
from portable_entry_cases import CASES, PARALLEL
from portable_entry_runs import (
    DEV,
    KEEP,
    check,
    environment,
    limits_of_kept,
    run_grid,
    run_ranks,
)
from releases import only

FEW = (
    "none", "mean", "blocks", "three dimensions", "other ignore index", "all ignored", "label outside the vocabulary",
    "sequence parallel", "strided gradient", "logits far above zero", "no token", "frozen hidden", "frozen weight",
    "autocast", "bfloat16", "float16",
)  # fmt: skip
"""Cases of every day, one for each path."""


def chosen(cases: Iterable[str], grid_size: str) -> list[str]:
    return [each for each in cases if grid_size == "all" or each in FEW]


@pytest.fixture(scope="module")
def on_cpu(grid_size: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    found: dict[str, Any] = run_grid(DEV, device="cpu", cases=chosen(CASES, grid_size))["cases"]
    return found


@pytest.mark.parametrize("name", only(CASES, FEW))
def test_loss_and_gradients_are_those_of_float64(on_cpu: dict[str, Any], name: str) -> None:
    check(on_cpu[name], CASES[name])


@pytest.fixture(scope="module")
def kept_on_cpu(grid_size: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    found: dict[str, Any] = run_grid(DEV, KEEP, device="cpu", cases=chosen(SPLIT, grid_size))["cases"]
    return found


SPLIT = [name for name, case in CASES.items() if case.split]
"""Cases that do not fit into one block, or small logits would be kept in float32 anyway."""


@pytest.mark.parametrize("name", only(SPLIT, FEW))
def test_loss_and_gradients_are_right_from_logits_that_were_kept(kept_on_cpu: dict[str, Any], name: str) -> None:
    check(kept_on_cpu[name], CASES[name], limits_of_kept(CASES[name]))


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory, grid_size: str) -> Any:
    pytest.importorskip("triton")
    rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
    return run_ranks(DEV, rendezvous, chosen(PARALLEL, grid_size), "gloo", ["cpu", "cpu"])


@pytest.mark.parametrize("name", only(PARALLEL, FEW))
def test_two_shards_of_a_vocabulary_are_one_vocabulary(on_two_ranks: Any, name: str) -> None:
    for report in on_two_ranks:
        check(report["cases"][name], PARALLEL[name])


def test_a_real_tree_computes_the_same_with_the_portable_entry(upstream_trees: list[Path]) -> None:
    trees = [tree for tree in upstream_trees if (tree / "megatron/core/fusions/linear_cross_entropy").is_dir()]
    if not trees:
        pytest.skip("no --upstream-tree with a fused linear cross entropy")
    cases = ["none", "mean", "three dimensions", "bfloat16"]
    for tree in trees:
        found = run_grid(tree, device="cpu", cases=cases)["cases"]
        for name in cases:
            check(found[name], CASES[name])


# Arguments that the public functions refuse. No kernel runs, so no interpreter is needed.


@pytest.fixture(scope="module")
def entry() -> Any:
    pytest.importorskip("triton")
    from megacpp_overlays.kernels.linear_cross_entropy import entry as linear_cross_entropy_entry

    return linear_cross_entropy_entry


def tensors(tokens: int = 4, size: int = 3, classes: int = 5) -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.zeros(tokens, size),
        "weight": torch.zeros(classes, size),
        "labels": torch.zeros(tokens, dtype=torch.int64),
    }


def core(entry: Any, reduction: str = "mean", sequence_parallel: bool = False, **changed: torch.Tensor) -> Any:
    given = {**tensors(), **changed}
    return entry.forward_on_any_device(
        given["hidden"], given["weight"], given["labels"], None, reduction, -100, sequence_parallel
    )


def test_cpu_tensors_are_refused_by_name(entry: Any) -> None:
    with pytest.raises(ValueError, match=r"needs its tensors on one CUDA device: hidden on cpu, weight on cpu"):
        entry.forward(**tensors())


def test_cpu_tensors_are_refused_in_the_backward_pass_too(entry: Any) -> None:
    given = tensors()
    rows = torch.zeros(4)

    with pytest.raises(ValueError, match=r"needs its tensors on one CUDA device: global_hidden on cpu"):
        entry.backward(rows, given["hidden"], given["weight"], given["labels"], rows, rows, torch.tensor(4))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hidden": torch.zeros(4, 2)}, "do not fit together"),
        ({"hidden": torch.zeros(2, 2, 3)}, "do not fit together"),
        ({"weight": torch.zeros(3)}, "do not fit together"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, "one label for each"),
        ({"hidden": torch.zeros(4, 3, dtype=torch.bfloat16)}, r"hidden is torch.bfloat16 and weight torch.float32"),
        ({"hidden": torch.zeros(4, 3).double(), "weight": torch.zeros(5, 3).double()}, "both must be one of"),
        ({"labels": torch.zeros(4)}, "must be integers"),
        ({"hidden": torch.zeros(3, 4).t()}, "not contiguous: hidden"),
        ({"weight": torch.zeros(3, 5).t(), "labels": torch.zeros(8, dtype=torch.int64)[::2]}, "weight, labels"),
    ],
)
def test_inconsistent_arguments_are_refused_with_the_reason(
    entry: Any, changed: dict[str, torch.Tensor], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        core(entry, **changed)


def test_an_unknown_reduction_is_refused_as_upstream_does(entry: Any) -> None:
    with pytest.raises(ValueError, match="Invalid reduction: batchmean"):
        core(entry, reduction="batchmean")


@pytest.mark.parametrize(("reduction", "shape"), [("none", ()), ("none", (1,)), ("mean", (4,)), ("sum", (1,))])
def test_a_gradient_of_another_shape_than_the_loss_is_refused(
    entry: Any, reduction: str, shape: tuple[int, ...]
) -> None:
    given = tensors()
    rows = torch.ones(4)
    saved = (given["hidden"], given["weight"], given["labels"], rows, rows, torch.tensor(4))

    with pytest.raises(ValueError, match="dlogprobs is"):
        entry.backward_on_any_device(torch.ones(shape), *saved, reduction, -100, None, 0, 1, False)


# Single facts, and drawn inputs, from one interpreter.


@pytest.fixture(scope="module")
def facts(grid_size: str) -> dict[str, Any]:
    """Return the results of `portable_entry_facts.py`. It fails if a drawn size, labels or blocks are wrong."""
    pytest.importorskip("triton")
    command = ["-W", "ignore", SUPPORT / "portable_entry_facts.py", grid_size]
    done = warm_python.run(
        command, environment(DEV, {"device": "cpu"}, {}), after=warm_python.INTERPRETER, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_seven_values_are_upstream_s(facts: dict[str, Any]) -> None:
    """Two classes with logits (0, ln 3) for the first token, (0, 0) for the second; the third is ignored."""
    total = math.log(4) + math.log(2)
    losses = {"none": [math.log(4), math.log(2), 0.0], "sum": total, "mean": total / 2}

    for reduction, (loss, maximum, accumulate, valid, rank, ranks, same_hidden) in facts["seven_values"].items():
        assert loss[:2] == ["torch.float32", [3] if reduction == "none" else []]
        assert loss[2] == pytest.approx(losses[reduction], rel=1e-6)
        assert maximum == ["torch.float32", [3], pytest.approx([math.log(3), 0.0, math.log(3)], rel=1e-6)]
        assert accumulate == ["torch.float32", [3], pytest.approx([4 / 3, 2.0, 4 / 3], rel=1e-6)]
        assert valid == ["torch.int64", [], 2]
        assert (rank, ranks, same_hidden) == (0, 1, True)


def test_the_mean_over_no_token_is_nan_and_gives_no_gradient(facts: dict[str, Any]) -> None:
    nothing = [[[0.0, 0.0]] * 3, [[0.0, 0.0]] * 4]
    assert facts["mean_over_no_token"] == {arriving: [True, *nothing] for arriving in ("1.0", "0.0", "nan")}


def test_any_gradient_that_arrives_at_an_ignored_token_counts_as_zero(facts: dict[str, Any]) -> None:
    assert facts["gradients_that_arrive_at_an_ignored_token"] == {"nan": True, "inf": True}


def test_kept_logits_come_through_upstream_s_autograd_function(facts: dict[str, Any]) -> None:
    """Three products with them: the logits, and the gradients of hidden states and weight.

    Three blocks take 3 for the logits, and 3 for them again, 1 (the others are added to it) and 3 for the gradients. But
    the last block of the forward pass is still there. The first backward pass uses up the kept logits. If saved tensors
    are packed, as offloading does, autograd returns another tensor, which has no kept logits.
    """
    assert facts["products_of_a_step"] == {
        "kept": [1, 2],
        "computed again": [3, 6],
        "kept, second backward pass": [1, 2 + 7],
        "kept, but saved tensors are packed": [1, 7],
    }
    assert facts["same_gradients_every_time"]


def test_infinite_logits_of_ignored_tokens_do_not_spread(facts: dict[str, Any]) -> None:
    assert all(facts["infinite_logits_of_an_ignored_token"].values()), facts
