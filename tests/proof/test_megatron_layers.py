"""The proof with every type of layer: how its claims are judged, its launches, and the stand-ins for GPU kernels."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT

Kept = dict[str, Any]
PYTHON = ROOT / ".envs/proof/bin/python"
RESULTS = ROOT / "proof/results"
STOCK, OURS, ROUNDED = "stock", "overlays", "stock, rounded otherwise"
HOPPER = {
    "error": "RuntimeError: Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results for gated chunk_bwd_dqkwg",
    "steps": 0,
}
ABSENT = {"error": "ImportError: MambaSSM is not installed.", "steps": 0}
TRAINED = {"losses": [5.0, 4.0], "norms": [1.0, 1.0], "skipped": [0.0, 0.0], "nans": [0.0, 0.0]}


@pytest.fixture
def receipts() -> Kept:
    found: Kept = json.loads((RESULTS / "megatron-layers-cpu.json").read_text())
    return found


def verdicts(receipts: Kept) -> Kept:
    """Judge every claim anew that can be judged."""
    from megatron_layers import CLAIMS

    found = receipts["measured"]["megatron-layers"]
    return {claim.id: claim.judge(found) for claim in CLAIMS if claim.asked(found)}


def outcomes(receipts: Kept) -> dict[str, str]:
    return {name: verdict.outcome.value for name, verdict in verdicts(receipts).items()}


def runs(receipts: Kept, model: str) -> Kept:
    found: Kept = receipts["measured"]["megatron-layers"]["models"][model]["runs"]
    return found


def scale(model: str, way: str, step: int, factor: float) -> Callable[[Kept], None]:
    def change(receipts: Kept) -> None:
        runs(receipts, model)[way]["losses"][step] *= factor

    return change


def put(model: str, **ways: Kept) -> Callable[[Kept], None]:
    return lambda receipts: runs(receipts, model).update(ways)


def skip_a_step(receipts: Kept) -> None:
    runs(receipts, "latent")[OURS]["skipped"][3] = 1.0


def learn_nothing(receipts: Kept) -> None:
    for way in (STOCK, OURS):
        losses = runs(receipts, "softmax")[way]["losses"]
        losses[-1] = losses[0]


def decide(name: str, decision: str) -> Callable[[Kept], None]:
    return lambda receipts: runs(receipts, "latent")[OURS]["decisions"].update({name: decision})


def call_less(receipts: Kept) -> None:
    run = runs(receipts, "latent")[OURS]
    run["calls"]["dsa-sparse-attention"] = len(run["losses"]) - 1


BROKEN = {
    "a step is skipped": (skip_a_step, {"megatron-layers-latent"}),
    "nothing is learnt": (learn_nothing, {"megatron-layers-softmax"}),
    "a loss is off": (scale("latent", OURS, 3, 1.002), {"megatron-layers-latent"}),
    "a loss is no number": (scale("softmax", OURS, 3, math.nan), {"megatron-layers-softmax"}),
    "overlays alone end": (put("softmax", overlays=HOPPER), {"megatron-layers-softmax"}),
    "overlays end in another way": (put("kernels", overlays=ABSENT, stock=HOPPER), {"megatron-layers-kernels"}),
    "there is no stock to compare with": (put("kernels", overlays=TRAINED, stock=HOPPER), {"megatron-layers-kernels"}),
    "a step goes past a seam": (call_less, {"megatron-layers-used"}),
    "a conflict": (decide("seq-aux-loss-packed", "conflict"), {"megatron-layers-used"}),
}


@pytest.mark.parametrize(("change", "wrong"), BROKEN.values(), ids=BROKEN)
def test_a_claim_fails_if_its_measurements_differ(
    receipts: Kept, change: Callable[[Kept], None], wrong: set[str]
) -> None:
    change(receipts)

    assert {claim for claim, outcome in outcomes(receipts).items() if outcome == "FAILS"} == wrong


def test_each_claim_is_made_to_fail_above() -> None:
    from megatron_layers import CLAIMS

    assert set().union(*(wrong for _, wrong in BROKEN.values())) == {claim.id for claim in CLAIMS}


def test_every_claim_that_is_kept_holds_or_is_upstreams_own(receipts: Kept) -> None:
    assert outcomes(receipts) == {claim["id"]: claim["outcome"] for claim in receipts["claims"]}
    assert {claim for claim, outcome in outcomes(receipts).items() if outcome != "HOLDS"} == {"megatron-layers-kernels"}
    assert receipts["problems"] == []


@pytest.mark.parametrize(("factor", "outcome"), [(1.002, "HOLDS"), (1.0, "FAILS")])
def test_twice_the_rounding_of_stock_is_allowed(receipts: Kept, factor: float, outcome: str) -> None:
    rounded = json.loads(json.dumps(runs(receipts, "latent")[STOCK]))
    rounded["losses"][3] *= factor
    put("latent", **{ROUNDED: rounded})(receipts)
    scale("latent", OURS, 3, 1.003)(receipts)

    assert outcomes(receipts)["megatron-layers-latent"] == outcome


def test_an_error_of_fla_in_both_ways_is_upstreams_own_and_quoted(receipts: Kept) -> None:
    put("kernels", stock=HOPPER, overlays=HOPPER)(receipts)

    found = verdicts(receipts)["megatron-layers-kernels"]

    assert found.outcome.value == "UPSTREAM"
    assert found.figure == f"with overlays and without: {HOPPER['error']}"


def test_where_fla_refuses_nothing_its_kernels_are_judged_as_the_rest(receipts: Kept) -> None:
    put("kernels", stock=TRAINED, overlays=TRAINED)(receipts)

    assert outcomes(receipts)["megatron-layers-kernels"] == "HOLDS"


def test_packages_that_are_not_there_are_named_and_nothing_else_is_claimed(receipts: Kept) -> None:
    import page

    found = receipts["measured"]["megatron-layers"]
    found["packages"] |= {"mamba-ssm": None, "fla-core": None}
    found["models"] = {"latent": found["models"]["latent"]}
    put("latent", stock=ABSENT, overlays=ABSENT)(receipts)

    (judged,) = verdicts(receipts).values()

    assert judged.outcome.value == "UPSTREAM"
    assert judged.figure == f"not installed: mamba-ssm, fla-core; with overlays and without: {ABSENT['error']}"
    assert "- Packages: mamba-ssm is not installed, einops 0.8.2, fla-core is not installed" in page.markdown(receipts)


# --- the page ---


def test_receipts_are_those_of_the_stack_and_the_stand_ins(receipts: Kept) -> None:
    from megatron_layers import INPUTS

    kept = receipts["measured"]["megatron-layers"]["inputs"]

    assert kept == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in INPUTS}


def test_the_page_says_how_stock_ended_and_compares_no_times_with_it(receipts: Kept) -> None:
    kept = (RESULTS / "megatron-layers-cpu.md").read_text()

    assert "| overlays |" not in kept
    assert f"- stock: {runs(receipts, 'kernels')[STOCK]['error']}, after 0 steps" in kept.splitlines()


# --- launches ---


def pattern_of(words: tuple[str, ...]) -> str:
    return words[words.index("--hybrid-layer-pattern") + 1]


@pytest.mark.upstream
def test_between_them_the_models_have_every_symbol_that_megatron_knows() -> None:
    from megatron_layers_sizes import MODELS

    code = (
        "import json; from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern as parse\n"
        f"patterns = {[model.pattern for model in MODELS]}\n"
        "print(json.dumps([sorted(Symbols.VALID_LAYERS), [parse(each).mtp_num_depths for each in patterns]]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    known, depths = json.loads(done.stdout.splitlines()[-1])

    assert set().union(*(model.pattern for model in MODELS)) - {"/"} == set(known)
    assert depths == [1] * len(MODELS)


@pytest.mark.parametrize("on_gpus", [False, True], ids=["cpu", "gpu"])
def test_only_latent_models_are_given_words_of_sparse_attention(on_gpus: bool) -> None:
    import megatron_sizes
    from megatron_layers_sizes import MODELS, sized

    host = megatron_sizes._on_gpus(1, quick=False) if on_gpus else megatron_sizes._on_cpu(quick=False)
    words = {model: sized(model, host).arguments for model in MODELS}

    assert {model.id: "--multi-latent-attention" in given for model, given in words.items()} == {
        "latent": True,
        "softmax": False,
        "kernels": True,
    }
    assert all(pattern_of(given) == model.pattern for model, given in words.items())


# --- Triton's interpreter in the place of a GPU ---


PRODUCT = """
import json, torch, triton
import triton.language as tl

@triton.autotune([triton.Config({"ROWS": 16}), triton.Config({"ROWS": 32})], key=["size"])
@triton.jit
def product(left, right, out, used, size: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, size)
    a = tl.load(left + row * size + column[None, :])
    b = tl.load(right + column[:, None] * size + column[None, :])
    tl.store(out + row * size + column[None, :], tl.dot(a, b))
    tl.store(used, ROWS)

left, right = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
out, used = torch.empty(32, 32), torch.zeros(1, dtype=torch.int32)
product[lambda meta: (32 // meta["ROWS"],)](left, right, out, used, 32)
print(json.dumps([float((out - left.float() @ right.float()).abs().max()), int(used)]))
"""


def test_a_tuned_product_of_bfloat16_is_right_without_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "product.py"
    script.write_text(PRODUCT)

    done = subprocess.run(
        [PYTHON, "-W", "ignore", script],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "proof/on_cpu_interpreted"),
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )

    assert done.returncode == 0, done.stderr
    error, rows = json.loads(done.stdout)
    assert error < 1e-5
    assert rows == 32
