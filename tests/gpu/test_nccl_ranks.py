"""Defects between ranks on real devices, over NCCL: wrong without the overlay, right with it, on CUDA tensors.

The same scripts measure as on the CPU, in interpreters of their own. Needs megatron-core 0.19.2 or one with the same defects,
and one device, which ranks share where there are no more; see `forked_ranks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from places import HANG_S, ROOT, SUPPORT

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]

ROUNDING = 1e-5
"""In fp32, of the largest value, or of a loss near one."""
Facts = Callable[..., Any]


def variable(overlay: str) -> str:
    return f"MEGACPP_OVERLAY_{overlay.upper().replace('-', '_')}"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Run a script on ranks with devices, with its overlay or without it, and return its report."""

    def run(script: str, overlay: str, state: str, *words: str) -> Any:
        path = os.pathsep.join([str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANKS_ON": "cuda", variable(overlay): state}
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # another check would keep forked ranks from their devices
        folder = tmp_path_factory.mktemp("ranks")
        given = [str(folder)] if script != "repeated_routers.py" else []
        command = [sys.executable, "-W", "ignore", str(SUPPORT / script), *given, *words]
        said, errors = folder / "said", folder / "errors"
        # Into files: compilers that Inductor leaves behind would hold pipes open.
        with said.open("w") as out, errors.open("w") as err:
            done = subprocess.run(command, env=env, stdout=out, stderr=err, check=False, timeout=HANG_S)
        assert done.returncode == 0, errors.read_text()[-6000:]
        return json.loads(said.read_text().splitlines()[-1])  # NCCL may say its version before

    return run


def test_padded_documents_keep_to_themselves(facts: Facts) -> None:
    on, off = (facts("rolled_rows.py", "mtp-roll-padded-boundaries", state, "two ranks") for state in ("auto", "off"))

    assert (on["decision"], off["decision"]) == ("active", "disabled")
    for rows in (on["rows"], *on["two ranks"]):
        for row in rows.values():
            assert (row["wrong labels"], row["wrong masks"]) == (0, 0)
    losses = [*on["losses"].values(), *(row["loss"] for rank in on["two ranks"] for row in rank.values())]
    assert max(each[of] for each in losses for of in ("weights apart", "activations apart")) < ROUNDING
    assert off["rows"]["padded"]["wrong labels"] > 0
    assert off["losses"]["padded"]["weights apart"] > 0.1
    for rank in off["two ranks"]:
        assert rank["padded"]["wrong labels"] > 0
        assert rank["padded"]["loss"]["weights apart"] > 0.1
        assert rank["first alone padded"] == {"raised": "IndexError"}


@pytest.mark.parametrize("state", ["auto", "off"])
def test_pairs_of_ranks_with_other_numbers_of_documents_do_not_wait_for_each_other(state: str, facts: Facts) -> None:
    found = facts("rolled_rows.py", "mtp-roll-padded-boundaries", state, "two lanes")["two lanes"]

    assert [each["together"] for each in found] == [4, 4, 4, 4]
    if state == "auto":
        assert [len(each["rows"]) for each in found] == [2, 2, 4, 4]
        for each in found:
            assert {(row["wrong labels"], row["wrong masks"]) for row in each["rows"].values()} == {(0, 0)}


def test_down_projections_get_the_gradient_of_all_heads(facts: Facts) -> None:
    from shared_keys import ALONE, RIGHT

    found = facts("shared_keys.py", "mla-rope-key-gradient", "auto", "2")

    assert found["decision"] == "active"
    for rank in found["on"]["2"]:
        for name in rank.keys() - {ALONE}:
            each = rank[name]
            assert max(each["down apart"], each["others apart"], each["hidden apart"]) < ROUNDING, name
            assert each["replicas apart"] == 0.0, name
    for name in found["off"]["2"][0].keys() - {ALONE, RIGHT}:
        ranks = [rank[name] for rank in found["off"]["2"]]
        assert max(each["down apart"] for each in ranks) > 0.1, name
        assert (max(each["replicas apart"] for each in ranks) > 0.01) == ("replicated" in name), name


def test_smoothed_losses_are_the_plain_ones_and_the_same_on_all_ranks(facts: Facts) -> None:
    on, off = (facts("smoothed_losses.py", "tp-label-smoothing", state) for state in ("on", "off"))

    assert (on["decision"], off["decision"]) == ("active", "disabled")
    assert max(max(apart) for rank in on["ranks"] for apart in rank["2"]["apart"].values()) < ROUNDING
    assert len({tuple(rank["2"]["losses"]["0.1"]) for rank in on["ranks"]}) == 1
    assert len({tuple(rank["2"]["losses"]["0.1"]) for rank in off["ranks"]}) == 2
    assert max(rank["2"]["apart"]["0.1"][0] for rank in off["ranks"]) > 0.01
    for with_it, alone in zip(on["ranks"], off["ranks"], strict=True):
        assert with_it["2"]["without smoothing"] == alone["2"]["without smoothing"]


def layouts(found: Any, state: str) -> Iterator[tuple[str, str, float]]:
    """Yield how far gradients are from the true ones, by context parallel ranks and by the layout of a row."""
    rank = found["ranks"][0]
    for layout in rank.keys() - {"alone"}:
        for way, each in rank[layout][state].items():
            if way not in {"means", "unequal"}:
                yield layout, way, each["apart"]


def test_gradients_of_predictions_are_those_of_the_mean_over_the_tokens_of_all_ranks(facts: Facts) -> None:
    found = facts("counted_tokens.py", "mtp-token-counts-local", "on")

    assert found["decision"] == "active"
    assert {"1", "2"} <= {layout for layout, *_ in layouts(found, "both")} <= {"1", "2", "4"}
    assert max(apart for *_, apart in layouts(found, "both")) < ROUNDING
    for layout, way, apart in layouts(found, "neither"):
        assert (apart > 0.01) == ((layout, way) != ("1", "row, nothing")), (layout, way)


def test_the_mean_over_context_parallel_ranks_is_that_of_whole_sequences(facts: Facts) -> None:
    on, off = (facts("context_losses.py", "cp-local-loss-mean", state) for state in ("on", "off"))

    assert (on["decision"], off["decision"]) == ("active", "disabled")
    for with_it, alone in zip(on["ranks"], off["ranks"], strict=True):
        assert max(max(apart) for apart in with_it["2"]["apart"].values()) < ROUNDING
        assert with_it["2"]["same"] == alone["2"]["same"]
    for mask in ("last third", "one alone"):
        assert max(max(rank["2"]["apart"][mask]) for rank in off["ranks"]) > 0.005, mask


def test_losses_of_a_repeated_prediction_layer_count_once(facts: Facts) -> None:
    found = facts("repeated_routers.py", "hybrid-mtp-aux-loss", "auto")

    assert set(found["decisions"].values()) == {"active"}
    for state, times in (("on", 1), ("off", 2)):
        for name, way in found[state].items():
            if name != "second place":
                once, twice = (torch.tensor(way[each]["gradient"]) for each in ("once", "twice"))
                expected = once * (1 if name == "marked, balance" else times)
                torch.testing.assert_close(twice, expected, rtol=ROUNDING, atol=ROUNDING, msg=f"{state}, {name}")


def test_norms_get_the_gradient_of_one_rank(facts: Facts) -> None:
    found = facts("summed_norms.py", "tp-norm-gradients", "auto", "2")

    assert found["decision"] == "active"
    for rank in found["on"]["2"]:
        for name, way in rank.items():
            norms = {weight: each for weight, each in way.items() if weight.endswith(".weight")}
            assert norms, name
            assert max(each["apart"] for each in norms.values()) < ROUNDING, name
            assert way["drift"] == 0.0, name
    for rank in found["off"]["2"]:
        assert rank["latent queries"]["q_layernorm.weight"]["times"] == pytest.approx(2, rel=ROUNDING)
        assert rank["outputs"]["out_norm.weight"]["apart"] > 0.1
        assert rank["outputs"]["drift"] > 0
