"""Judgement of claims: from the receipts that are kept, each changed in one place that must be noticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

Kept = dict[str, Any]


def outcomes(kept: Kept) -> dict[str, str]:
    """Judge every claim anew."""
    import proofs
    from runner import judge

    return {
        claim.id: judge(claim, kept["measured"].get(subject.id)).outcome.value
        for subject in proofs.SUBJECTS
        for claim in subject.claims
    }


def trained(kept: Kept, launch: str) -> Kept:
    found: Kept = kept["measured"]["trainer"]["runs"][launch]
    return found


def outcomes_of(kept: Kept, way: str) -> Kept:
    found: Kept = kept["measured"]["liger-tests"][way]
    return found


def scale(launch: str, series: str, step: int, factor: float) -> Callable[[Kept], None]:
    def change(kept: Kept) -> None:
        trained(kept, launch)[series][step] *= factor

    return change


def decide(launch: str, decision: str) -> Callable[[Kept], None]:
    return lambda kept: trained(kept, launch).update(decision=decision)


def call(launch: str, times: int) -> Callable[[Kept], None]:
    return lambda kept: trained(kept, launch).update(calls=times)


def learns(kept: Kept) -> None:
    trained(kept, "prompts, stock")["norms"][7] = 1e-30


def right_gradients(kept: Kept) -> None:
    trained(kept, "weights, stock")["norms"] = trained(kept, "weights, PyTorch")["norms"]


def last_bit(kept: Kept) -> None:
    losses = trained(kept, "weights, overlay off")["losses"]
    losses[-1] = math.nextafter(losses[-1], 0)


def lose_a_test(kept: Kept) -> None:
    name = next(name for name in outcomes_of(kept, "with")["passed"] if name in outcomes_of(kept, "without")["passed"])
    outcomes_of(kept, "with")["passed"].remove(name)
    outcomes_of(kept, "with")["failed"][name] = outcomes_of(kept, "without")["failed"][name] = "the same error"


def run_no_test(kept: Kept) -> None:
    for way in ("without", "with"):
        outcomes_of(kept, way)["passed"] = []


def fail_otherwise(kept: Kept) -> None:
    name = next(iter(outcomes_of(kept, "with")["failed"]))
    outcomes_of(kept, "with")["failed"][name] = "AssertionError: another error"


def fail_alone(kept: Kept) -> None:
    outcomes_of(kept, "with")["failed"]["test_of_a_new_kind"] = "AssertionError"


def repair_nothing(kept: Kept) -> None:
    kept["measured"]["liger-tests"]["with"] = outcomes_of(kept, "without")


def skip_a_regression_test(kept: Kept) -> None:
    name = next(name for name in outcomes_of(kept, "with")["passed"] if "reduction_none" in name)
    outcomes_of(kept, "with")["passed"].remove(name)


BROKEN = {
    "stock learns after all": (learns, {"trainer-prompts-stock"}),
    "the import does less than run": (
        scale("prompts, one import", "norms", 3, 1 + 1e-9),
        {"trainer-prompts-import"},
    ),
    "PyTorch learns nothing either": (
        scale("prompts, PyTorch", "losses", -1, 100.0),
        {"trainer-prompts-stock", "trainer-prompts-overlay", "trainer-prompts-newer"},
    ),
    "stock gradients are right": (right_gradients, {"trainer-weights-stock", "trainer-weights-off"}),
    "a loss is off": (
        scale("prompts, overlay", "losses", 5, 1.001),
        {"trainer-prompts-overlay", "trainer-prompts-import"},
    ),
    "a gradient is off": (scale("weights, overlay", "norms", 5, 0.999), {"trainer-weights-overlay"}),
    "a gradient is no number": (scale("weights, overlay", "norms", 5, math.nan), {"trainer-weights-overlay"}),
    "the last gradient is no number": (scale("weights, overlay", "norms", -1, math.nan), {"trainer-weights-overlay"}),
    "the repaired release is off": (
        scale("prompts, overlay, Liger 0.8.5", "norms", 0, 2.0),
        {"trainer-prompts-newer"},
    ),
    "a step goes past the seam": (call("prompts, overlay", 59), {"trainer-used"}),
    "what is off is called": (call("weights, overlay off", 1), {"trainer-used"}),
    "a conflict": (decide("prompts, overlay", "conflict"), {"trainer-decisions"}),
    "active where nothing is broken": (decide("prompts, overlay, Liger 0.8.5", "active"), {"trainer-decisions"}),
    "active where it was switched off": (decide("weights, overlay off", "active"), {"trainer-decisions"}),
    "the last bit, switched off": (last_bit, {"trainer-weights-off"}),
    "a test of upstream is lost": (lose_a_test, {"liger-tests-kept"}),
    "no test of upstream ran": (run_no_test, {"liger-tests-kept", "liger-tests-repaired"}),
    "a test fails with another error": (fail_otherwise, {"liger-tests-rest"}),
    "a test fails with overlays alone": (fail_alone, {"liger-tests-rest"}),
    "overlays repair nothing": (repair_nothing, {"liger-tests-repaired"}),
    "a regression test was not run": (skip_a_regression_test, {"liger-tests-repaired"}),
}


def test_every_claim_that_is_kept_holds_or_is_upstreams_own(kept: Kept) -> None:
    assert outcomes(kept) == {claim["id"]: claim["outcome"] for claim in kept["claims"]}
    assert set(outcomes(kept).values()) == {"HOLDS", "UPSTREAM"}


@pytest.mark.parametrize(("change", "wrong"), BROKEN.values(), ids=BROKEN)
def test_a_claim_fails_if_its_measurements_differ(kept: Kept, change: Callable[[Kept], None], wrong: set[str]) -> None:
    change(kept)

    assert {claim for claim, outcome in outcomes(kept).items() if outcome == "FAILS"} == wrong


def test_each_claim_is_made_to_fail_above(kept: Kept) -> None:
    assert set().union(*(wrong for _, wrong in BROKEN.values())) == set(outcomes(kept))


def test_where_no_test_of_upstream_fails_the_claim_about_the_rest_holds(kept: Kept) -> None:
    outcomes_of(kept, "with")["failed"] = {}

    assert outcomes(kept)["liger-tests-rest"] == "HOLDS"


# --- the same on a GPU ---

NEAR, FAR = 1.005, 1.06
"""Of bfloat16's rounding, as the GPU's claims allow it."""


def on_a_gpu(kept: Kept) -> None:
    kept["measured"]["trainer"]["host"] = "gpu"


@pytest.mark.parametrize(
    ("launch", "series", "claims"),
    [
        ("prompts, overlay", "losses", {"trainer-prompts-overlay", "trainer-prompts-import"}),
        ("weights, overlay", "norms", {"trainer-weights-overlay"}),
        ("prompts, one import", "norms", {"trainer-prompts-import"}),
        ("weights, overlay off", "losses", {"trainer-weights-off"}),
        ("prompts, overlay, Liger 0.8.5", "norms", {"trainer-prompts-newer"}),
    ],
)
def test_on_a_gpu_the_rounding_of_bfloat16_is_allowed_and_no_more(
    kept: Kept, launch: str, series: str, claims: set[str]
) -> None:
    on_a_gpu(kept)
    scale(launch, series, 5, NEAR)(kept)
    assert "FAILS" not in outcomes(kept).values()

    scale(launch, series, 5, FAR)(kept)
    assert {claim for claim, outcome in outcomes(kept).items() if outcome == "FAILS"} == claims


@pytest.mark.parametrize(("change", "wrong"), BROKEN.values(), ids=BROKEN)
def test_on_a_gpu_no_other_claim_fails_than_on_a_cpu(
    kept: Kept, change: Callable[[Kept], None], wrong: set[str]
) -> None:
    on_a_gpu(kept)
    change(kept)

    assert {claim for claim, outcome in outcomes(kept).items() if outcome == "FAILS"} <= wrong


def test_the_page_of_a_gpu_names_it_and_its_sizes_and_has_no_plot(kept: Kept) -> None:
    import page

    on_a_gpu(kept)
    kept["measured"]["trainer"]["sizes"] = "16 layers"
    kept["host"].update(gpu="a GPU", driver="1", power_limit="700 W")
    del kept["measured"]["liger-tests"]

    text = page.markdown(kept)

    assert text.startswith("# Proof on a GPU\n\nWritten by `make proof-gpu`")
    assert "30 steps, 16 layers." in text
    assert "cpu.svg" not in text


def test_the_defect_is_far_more_than_a_gpu_allows(kept: Kept) -> None:
    on_a_gpu(kept)
    for data in ("prompts", "weights"):
        runs = kept["measured"]["trainer"]["runs"]
        runs[f"{data}, overlay"].update({key: runs[f"{data}, stock"][key] for key in ("losses", "norms")})

    failed = {claim for claim, outcome in outcomes(kept).items() if outcome == "FAILS"}
    assert {"trainer-prompts-overlay", "trainer-weights-overlay"} <= failed


def test_a_claim_without_a_measurement_fails(kept: Kept) -> None:
    del kept["measured"]["trainer"]

    assert {outcome for claim, outcome in outcomes(kept).items() if claim.startswith("trainer")} == {"FAILS"}
