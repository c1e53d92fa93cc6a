"""Real layers on explicit tensor parallel groups with the overlay: each has the results of one rank.

The measurements are in `explicit_groups.py`, which runs in its own process for each release and forks four ranks.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from placed_seams import placed, without_overlays
from places import SUPPORT
from releases import newest, weekly
from upstream_imports import upstream_module

from megacpp_overlays.feature_probes import explicit_tp_groups as feature
from megacpp_overlays.model import Overlay
from megacpp_overlays.overlays.explicit_tp_groups import PARTS

pytestmark = pytest.mark.upstream

NEWEST = newest()
RELEASES = ("0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", NEWEST)
_FIRST = frozenset({"cross", "latent", "layers"})
WAYS = {
    "0.13.1": _FIRST,
    **dict.fromkeys(("0.14.0", "0.15.3", "0.16.1", "0.18.2"), _FIRST | {"combined"}),
    **dict.fromkeys(("0.17.1", NEWEST), _FIRST | {"combined", "predictions"}),
}
"""First words of the names of ways that a release has."""
ROUNDING = 1e-5
"""Relative, of the largest value, in fp32."""
FORWARD_IS_RIGHT = {"cross attention", "predictions", "layers"}
"""Ways whose forward pass is right upstream, and only the backward pass is wrong."""


@pytest.fixture(scope="module", params=weekly(*RELEASES))
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]
) -> tuple[str, Any]:
    """A release, and its results with the overlay and without it."""
    version, folder = request.param, tmp_path_factory.mktemp("ranks")
    script = SUPPORT / "explicit_groups.py"
    return version, megatron_says(version, script, folder, "crossed", "default")


def each_way(found: Any, layout: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield each way with the results of all ranks."""
    for name in found[layout][0]:
        yield name, [each[name] for each in found[layout]]


def test_every_part_is_active_or_has_nothing_to_do(measured: tuple[str, Any]) -> None:
    version, found = measured

    decisions = {module: decision for module, (decision, _) in found["decisions"].items()}
    assert set(decisions.values()) == {"active", "absent"}, found["decisions"]
    assert {name.split()[0] for name in found["on"]["crossed"][0]} == WAYS[version]


def test_upstream_is_wrong_on_groups_that_are_not_the_default_ones_in_silence(measured: tuple[str, Any]) -> None:
    _, found = measured

    for name, ranks in each_way(found["off"], "crossed"):
        assert min(each["gradients"] for each in ranks) > 0.5, name
        assert (max(each["output"] for each in ranks) < ROUNDING) == (name in FORWARD_IS_RIGHT), name


def test_with_it_every_rank_has_its_share_of_the_results_of_one_rank(measured: tuple[str, Any]) -> None:
    """Multi-latent attention of 0.13 learns its rotary keys from the heads of a rank, whatever its group: that is pack 25."""
    version, found = measured

    for name, ranks in each_way(found["on"], "crossed"):
        assert max(each["output"] for each in ranks) < ROUNDING, name
        if not (version == "0.13.1" and name.startswith("latent")):
            assert max(each["gradients"] for each in ranks) < ROUNDING, name


def test_it_has_the_bits_of_the_same_layer_on_default_groups(measured: tuple[str, Any]) -> None:
    """On crossed pairs ranks 0 and 2 have the bits of ranks 0 and 1 on default pairs, and 1 and 3 those of 2 and 3."""
    _, found = measured
    crossed, default = found["on"]["crossed"], found["on"]["default"]

    for ours, theirs in ((0, 0), (2, 1), (1, 2), (3, 3)):
        for name, each in crossed[ours].items():
            assert each["bits"] == default[theirs][name]["bits"], name


def test_with_default_groups_all_has_upstream_s_bits(measured: tuple[str, Any]) -> None:
    _, found = measured

    assert found["on"]["default"] == found["off"]["default"]


@pytest.mark.full
def test_default_groups_of_all_ranks_or_of_one_are_no_matter_either(
    tmp_path_factory: pytest.TempPathFactory, megatron_says: Callable[..., Any]
) -> None:
    """Without it most of that ends in an error."""
    folder = tmp_path_factory.mktemp("ranks")
    found = megatron_says(NEWEST, SUPPORT / "explicit_groups.py", folder, "wide", "narrow", STATES="on")

    for layout in ("wide", "narrow"):
        for name, ranks in each_way(found["on"], layout):
            assert max(max(each["output"], each["gradients"]) for each in ranks) < ROUNDING, (layout, name)


# In this process


PLACED = {part.target.module: part for part in PARTS if part.target != feature.OLD_LAYERS}
HELPER = PLACED[feature.DEFAULT.module]
SHAPES = {
    feature.DEFAULT.module: feature.DEFAULT_GROUP,
    feature.CROSS.module: feature.PROJECTIONS,
    feature.LATENT.module: feature.LATENTS,
    feature.LLAVA.module: feature.EMBEDDINGS,
    feature.PREDICTION.module: feature.SAVED,
    feature.LAYERS.module: feature.STACK,
    feature.CHECKPOINT.module: feature.PIECES,
}


@pytest.fixture(scope="module")
def utils() -> Iterator[ModuleType]:
    """The newest release, without any overlay."""
    for name in PLACED:
        upstream_module(name)
    with without_overlays(feature.DEFAULT.module) as found:
        yield found


@pytest.mark.parametrize("name", PLACED)
def test_a_witness_sees_the_defect_and_a_self_test_its_absence(utils: ModuleType, name: str) -> None:
    part, module = PLACED[name], importlib.import_module(name)
    assert part.witness is not None
    before = dict(vars(module))

    assert part.witness(module).broken
    assert vars(module) == before
    with placed(HELPER, feature.DEFAULT_GROUP, utils):
        if part is not HELPER:
            assert part.self_test(module).broken  # the helper alone knows of nothing
            with placed(part, SHAPES[name], module):
                assert not part.self_test(module).broken
    assert part.witness(module).broken


def made(part: Overlay, shape: str, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
    return part.replacements[shape][index].make(original, ModuleType("module"))


@pytest.fixture
def helper() -> Callable[..., Any]:
    """The helper, which says "default" where upstream's would."""
    return made(HELPER, feature.DEFAULT_GROUP, 0, lambda group, is_expert=False, **_: group or f"default {is_expert}")


@pytest.fixture
def running() -> Callable[[Any, Callable[[], Any]], Any]:
    """Call a function from within the method of a module that has a group."""

    def run(group: Any, inside: Callable[[], Any]) -> Any:
        method = made(PLACED[feature.LLAVA.module], feature.EMBEDDINGS, 0, lambda _: inside())
        return method(SimpleNamespace(pg_collection=SimpleNamespace(tp=group)))

    return run


def test_a_helper_takes_the_group_of_the_innermost_module_and_only_while_it_runs(helper: Any, running: Any) -> None:
    seen = running("outer", lambda: [helper(None), running("inner", lambda: helper(None)), helper(None)])

    assert seen == ["outer", "inner", "outer"]
    assert helper(None) == "default False"


def test_a_group_that_is_given_counts_and_groups_of_experts_are_others(helper: Any, running: Any) -> None:
    seen = running("own", lambda: [helper("given"), helper(None, True), helper(None, is_expert=True)])

    assert seen == ["given", "default True", "default True"]


def test_other_arguments_of_a_helper_are_passed_on_by_position_and_by_name() -> None:
    def upstream(group: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
        return group, is_expert, check_initialized

    helper = made(HELPER, feature.DEFAULT_GROUP, 0, upstream)

    assert helper("given", True, False) == helper("given", is_expert=True, check_initialized=False)
    assert helper("given", True, False) == ("given", True, False)
    assert helper(tp_group=None) == (None, False, True)


def test_an_error_leaves_no_note(helper: Any, running: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        running("own", lambda: 1 / 0)

    assert helper(None) == "default False"


def test_a_note_is_of_its_thread(helper: Any, running: Any) -> None:
    seen: list[Any] = []

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: seen.append(helper(None)))
        thread.start()
        thread.join()

    running("own", elsewhere)

    assert seen == ["default False"]


@pytest.mark.parametrize(
    ("config", "noted"),
    [
        ({"distribute_saved_activations": True, "fp8": None}, "own"),
        ({"distribute_saved_activations": False, "fp8": None}, "default False"),
        ({"distribute_saved_activations": True, "fp8": "hybrid"}, "default False"),
        ({"distribute_saved_activations": True, "fp8": None, "fp4": "e2m1"}, "default False"),
    ],
)
def test_only_tensors_that_megatron_itself_distributes_have_a_note(
    helper: Any, config: dict[str, Any], noted: str
) -> None:
    save = made(PLACED[feature.LAYERS.module], feature.STACK, 0, lambda _: helper(None))

    assert save(SimpleNamespace(config=SimpleNamespace(**config), tp_group="own")) == noted


def test_a_recomputation_has_no_note_and_a_gathered_one_has_the_note_it_was_saved_with(helper: Any) -> None:
    part, seen = PLACED[feature.CHECKPOINT.module], list[Any]()

    def upstream_forward(ctx: Any, run: Any, _distribute: bool, *args: Any) -> None:
        ctx.run = run
        seen.append((run(*args), helper(None)))

    def upstream_backward(ctx: Any, *_: Any) -> None:
        seen.append((ctx.run(1), helper(None)))

    forward, backward = (
        made(part, feature.PIECES, index, each) for index, each in enumerate((upstream_forward, upstream_backward))
    )
    save = made(
        PLACED[feature.LAYERS.module],
        feature.STACK,
        0,
        lambda _, ctx, distribute: forward(ctx, lambda _: helper(None), distribute, 1),
    )
    holder = SimpleNamespace(
        config=SimpleNamespace(distribute_saved_activations=True, fp8=None, fp4=None), tp_group="own"
    )
    ctx = SimpleNamespace()

    save(holder, ctx, True)
    backward(ctx)
    assert seen == [("default False", "own")] * 2

    seen.clear()
    forward(plain := SimpleNamespace(), lambda _: helper(None), True, 1)
    backward(plain)
    assert seen == [("default False", "default False")] * 2


def test_a_compiled_method_takes_the_group_of_its_module(helper: Any) -> None:
    """Upstream's helper warns, which cannot be compiled, so this is more than upstream can."""
    factors, part = {"own": 2.0, "default False": 3.0}, PLACED[feature.LLAVA.module]
    method = made(part, feature.EMBEDDINGS, 0, lambda _, values: values * factors[helper(None)])
    model = SimpleNamespace(pg_collection=SimpleNamespace(tp="own"))
    inside = torch.compile(lambda values: method(model, values), backend="eager", fullgraph=True)
    outside = torch.compile(lambda values: values * factors[helper(None)], backend="eager", fullgraph=True)

    assert inside(torch.ones(2)).tolist() == [2.0, 2.0]
    assert outside(torch.ones(2)).tolist() == [3.0, 3.0]


_IN_A_GROUP_FIRST = """
import sys, torch, megacpp_overlays
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
import megatron.core.transformer.multi_latent_attention
import json
print(json.dumps({each.overlay.target.module: each.decision.value for each in megacpp_overlays.audit().records
                  if each.overlay.id == "explicit-tp-groups"}))
"""


@pytest.mark.full
def test_a_process_group_that_is_there_before_megatron_changes_no_decision(tmp_path: Path) -> None:
    """Upstream's helper then asks `parallel_state`, which is half-imported when the helper's own module is complete."""
    command = [sys.executable, "-W", "ignore", "-c", _IN_A_GROUP_FIRST, str(tmp_path / "meeting")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    decisions = json.loads(done.stdout.strip().splitlines()[-1])

    assert decisions[feature.DEFAULT.module] == "active"
    assert "conflict" not in decisions.values()


def test_parts_need_the_part_that_answers_for_the_group() -> None:
    needing = {part.target.module: set(part.needs_parts) for part in PARTS}
    helper = feature.DEFAULT.module

    assert needing.pop(helper) == set()
    assert all(helper in needed for needed in needing.values())
