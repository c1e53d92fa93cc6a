"""Real layers of Megatron with the overlay: local CUDA graphs find all of their parameters, and nothing else is recomputed less.

Graphs need a GPU. Here the layers that a graph would capture are run, and the release's own walk shows which parameters it finds.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from places import SUPPORT
from releases import daily, newest

from megacpp_overlays.overlays.graph_hidden_recompute_grads import OVERLAY, observe

pytestmark = pytest.mark.upstream

BROKEN = ("0.16.1", "0.17.1", "0.18.2", newest())
CAPTURED = ("local", "local, attention", "local, alone", "deprecated")
LEFT_ALONE = ("none", "te", "local, mamba", "local, nothing hidden", "mla, none")
NORMS = {"input_layernorm.bias", "input_layernorm.weight", "pre_mlp_layernorm.bias", "pre_mlp_layernorm.weight"}
OF_MLA = {
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_q_up_proj.weight",
}


@pytest.fixture(scope="module", params=daily(*BROKEN))
def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> Any:
    """The modules that layers of a release recompute with the overlay and without it, and the parameters that graphs do not find."""
    return megatron_says(request.param, SUPPORT / "hidden_gradients.py")


def test_upstreams_graphs_do_not_find_recomputed_parameters(measured: Any) -> None:
    lost = {name: facts["lost"] for name, facts in measured["off"].items()}

    assert {name: set(lost[name]) for name in CAPTURED} == dict.fromkeys(CAPTURED, NORMS)
    assert set(lost["mla, local"]) >= OF_MLA
    assert lost["local, nothing hidden"] == []


def test_graphs_find_every_parameter(measured: Any) -> None:
    assert measured["decision"] == "active"
    for name in (*CAPTURED, "mla, local", "local, nothing hidden"):
        assert measured["on"][name]["lost"] == [], name


def test_modules_whose_gradients_graphs_would_lose_are_not_recomputed(measured: Any) -> None:
    for name in (*CAPTURED, "mla, local"):
        found = measured["on"][name]
        assert found["modules"] == ([] if name == "local, alone" else ["core_attn"])
        assert found["granularity"] == "selective"
        assert found["norms"] == [False, False]
        assert not found["projections"]
        assert found["output"] == measured["off"][name]["output"]


def test_nothing_is_changed_where_no_graph_captures_it(measured: Any) -> None:
    for name in LEFT_ALONE:
        assert measured["on"][name] == measured["off"][name]


def test_a_list_that_is_the_users_is_left_as_it_is(measured: Any) -> None:
    for way in ("on", "off"):
        for name, found in measured[way].items():
            assert found["given"] == measured["off"][name]["modules"], name


def module() -> Any:
    """Return a module with the overlay's seam, whose layers keep their arguments and do nothing else."""

    class TransformerLayer:
        def __init__(self, config: Any, submodules: Any = None) -> None:
            self.submodules_config = submodules
            self.config = config

    found: Any = SimpleNamespace(TransformerLayer=TransformerLayer)
    (seam,) = OVERLAY.replacements["not-found"]
    TransformerLayer.__init__ = seam.make(TransformerLayer.__init__, found)  # type: ignore[method-assign]
    return found


def config(graphs: str = "local", *recomputed: str, parts: tuple[str, ...] = (), **more: Any) -> Any:
    return SimpleNamespace(
        cuda_graph_impl=graphs,
        cuda_graph_modules=[SimpleNamespace(name=each) for each in parts],
        recompute_granularity="selective",
        recompute_modules=list(recomputed),
        **more,
    )


HIDDEN = ("layernorm", "mla_up_proj", "gdn_norm_out")
OTHERS = ("core_attn", "moe_act", "mlp", "moe", "shared_experts")


@pytest.mark.parametrize(
    ("parts", "taken"),
    [
        ((), HIDDEN),
        (("attn",), HIDDEN),
        (("mlp",), HIDDEN),
        (("moe",), HIDDEN),
        (("mamba", "attn"), HIDDEN),
        (("moe_router", "moe_preprocess"), ("layernorm",)),
        (("mamba",), ()),
        (("full_iteration",), ()),
        (("full_iteration_inference",), ()),
    ],
)
def test_the_modules_taken_out_depend_on_the_captured_ones(parts: tuple[str, ...], taken: tuple[str, ...]) -> None:
    given = config("local", *HIDDEN, *OTHERS, parts=parts)

    module().TransformerLayer(given)

    assert given.recompute_modules == [each for each in (*HIDDEN, *OTHERS) if each not in taken]


@pytest.mark.parametrize("graphs", ["none", "transformer_engine", "full_iteration"])
def test_other_graphs_are_left_alone(graphs: str) -> None:
    given = config(graphs, *HIDDEN)

    module().TransformerLayer(given)

    assert given.recompute_modules == list(HIDDEN)


def test_graphs_of_inference_alone_are_left_alone() -> None:
    given = config("local", *HIDDEN, inference_cuda_graph_scope=SimpleNamespace(name="block"))

    module().TransformerLayer(given)

    assert given.recompute_modules == list(HIDDEN)


@pytest.mark.parametrize("granularity", [None, "full"])
def test_only_selective_recompute_is_changed(granularity: str | None) -> None:
    given = config("local", *HIDDEN)
    given.recompute_granularity = granularity

    module().TransformerLayer(given)

    assert given.recompute_modules == list(HIDDEN)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_made_before_is_changed_when_a_layer_is_made_of_it(copied: Callable[[Any], Any]) -> None:
    given, made = config("local", *HIDDEN), module()
    another = copied(given)

    made.TransformerLayer(given)
    made.TransformerLayer(another)

    assert given.recompute_modules == another.recompute_modules == []


def test_one_warning_names_the_modules_that_are_kept_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    made = module()
    with caplog.at_level(logging.WARNING, "megacpp_overlays"):
        for _ in range(3):
            made.TransformerLayer(config("local", "layernorm", "core_attn"))
        made.TransformerLayer(config=config("local", "layernorm", "mla_up_proj"))

    first, second = (each.getMessage() for each in caplog.records)
    assert "gradients" in first
    assert "modules: layernorm (" in first
    assert "modules: layernorm, mla_up_proj (" in second
    assert f"{OVERLAY.variable}=off" in first


def test_the_self_test_warns_of_nothing_and_leaves_the_warning_to_the_user(caplog: pytest.LogCaptureFixture) -> None:
    made = module()
    with caplog.at_level(logging.WARNING, "megacpp_overlays"):
        assert not observe(made).broken
        assert not caplog.records
        made.TransformerLayer(config("local", "layernorm"))

    assert len(caplog.records) == 1


def test_a_constructor_that_takes_too_little_or_too_much_fails_the_self_test() -> None:
    def untouched(self: Any, config: Any, submodules: Any = None) -> None:
        self.submodules_config = submodules

    def emptied(self: Any, config: Any, submodules: Any = None) -> None:
        config.recompute_modules = [each for each in config.recompute_modules if each != "layernorm"]
        self.submodules_config = submodules

    for each in (untouched, emptied):
        layer = type("TransformerLayer", (), {"__init__": each})
        made: Any = SimpleNamespace(TransformerLayer=layer)
        assert observe(made).broken
    assert OVERLAY.self_test is observe
