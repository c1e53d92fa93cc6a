"""The gate of pack 19: the configurations that the tuner may choose, and the GPUs of the host for which they matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from installed import Edited, tree_of
from probing import ask

from megacpp_overlays.feature_probes.mamba3_siso_pipelining import ANY_STAGES, probe
from megacpp_overlays.loader import probing
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.mamba3_siso_pipelining import OVERLAY
from megacpp_overlays.runtime import gpus

PRUNED = """
def keep(configs, named_args, **kwargs):
    major, _ = torch.cuda.get_device_capability(named_args["Q"].device)
    if major in (10, 12):
        return [config for config in configs if config.num_stages == 1]
    return configs


@triton.autotune(
    prune_configs_by={"early_config_prune": keep},"""

pytestmark = pytest.mark.upstream

FILE = "mamba_ssm/ops/triton/mamba3/mamba3_siso_fwd.py"
TUNER = "@triton.autotune("


def test_the_release_lets_the_tuner_choose() -> None:
    assert ask(probe, tree_of("mamba3-pinned")).shape == ANY_STAGES
    assert ask(probe, tree_of("spring-2026")).verdict is Verdict.ABSENT


def test_a_file_that_was_read_needs_no_parsing_and_an_edited_one_gets_it() -> None:
    tree = Edited(tree_of("mamba3-pinned"), FILE, {"import triton\n": "import triton  # as it was\n"})

    found, expected = ask(probe, tree), ask(probe, tree_of("mamba3-pinned"))

    assert (found.shape, found.evidence[0]) == (expected.shape, expected.evidence[0])


def test_an_unknown_pruning_to_one_stage_is_not_recognised() -> None:
    tree = Edited(tree_of("mamba3-pinned"), FILE, {TUNER: PRUNED})

    assert ask(probe, tree).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    "edit",
    [
        {TUNER: PRUNED.replace("(10, 12)", "(10,)")},
        {TUNER: PRUNED.replace("num_stages == 1", "num_stages == 2")},
        {TUNER: PRUNED.replace("early_config_prune", "perf_model")},
        {TUNER: PRUNED.replace("prune", "prune_", 1).replace("def keep", "def other")},
        {"for s in [1, 2, 3]": "for s in [1, 2]"},
        {TUNER: "@autotuned("},
    ],
)
def test_other_configurations_are_not_recognised(edit: dict[str, str]) -> None:
    assert ask(probe, Edited(tree_of("mamba3-pinned"), FILE, edit)).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("there", "verdict"),
    [
        (frozenset({(9, 0)}), Verdict.ABSENT),
        (frozenset({(8, 0), (9, 0)}), Verdict.ABSENT),
        (frozenset({(10, 0)}), Verdict.BROKEN),
        (frozenset({(9, 0), (12, 0)}), Verdict.BROKEN),
        (None, Verdict.BROKEN),
    ],
)
def test_it_matters_where_there_is_a_blackwell_or_where_that_cannot_be_known(
    monkeypatch: pytest.MonkeyPatch, there: frozenset[tuple[int, int]] | None, verdict: Verdict
) -> None:
    monkeypatch.setattr(gpus, "capabilities", lambda: there)

    found = probing.examine_installed(OVERLAY, tree_of("mamba3-pinned"), Settings())

    assert found.verdict is verdict
    assert ("every GPU of this host" in found.summary()) == (verdict is Verdict.ABSENT)


@pytest.mark.parametrize("there", [frozenset({(9, 0)}), frozenset({(10, 0)}), None])
def test_the_shape_of_a_release_is_the_same_on_every_host(
    monkeypatch: pytest.MonkeyPatch, there: frozenset[tuple[int, int]] | None
) -> None:
    monkeypatch.setattr(gpus, "capabilities", lambda: there)

    assert probing.examine(OVERLAY, tree_of("mamba3-pinned")).shape == ANY_STAGES


def test_asking_for_gpus_answers_or_says_that_it_cannot(run_python: Callable[..., object]) -> None:
    found = gpus.capabilities()

    assert found is None or all(major >= 3 for major, _ in found)
    code = (
        "from megacpp_overlays.runtime import gpus; gpus.capabilities(); import os; "
        "assert not any('cuda' in line for line in open('/proc/self/maps') if 'libcuda.so' in line)"
    )
    run_python(code)
