"""Features checked against real Megatron: fields and arguments of its releases, its configuration objects, and those of packs."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT
from releases import newest

from megacpp_overlays.concerns.command_lines import _TAKES_A_VALUE
from megacpp_overlays.concerns.configuration import Configuration, Vocabulary, possible
from megacpp_overlays.concerns.features import FEATURES, PROGRAM, Sign
from megacpp_overlays.concerns.predicates import Ternary, _of_value, of_predicate
from megacpp_overlays.loader import registry

RELEASES = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
FILES = (
    "megatron/core/model_parallel_config.py",
    "megatron/core/transformer/transformer_config.py",
    "megatron/core/optimizer/optimizer_config.py",
    "megatron/core/distributed/distributed_data_parallel_config.py",
)
BASES = {"ModelParallelConfig": "TransformerConfig"}
IN_NO_CLASS = {"hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern", "sft", "rl_use_sequence_packing", "use_liger_kernel"}  # fmt: skip
"""Keys that show a feature and are only arguments, or belong to another library."""
Wheels = Callable[[str, str], Path]


def _fields(wheel: Path) -> dict[tuple[str, str], object]:
    """Return the defaults of a release by configuration class and field."""
    found: dict[tuple[str, str], object] = {}
    with zipfile.ZipFile(wheel) as archive:
        for file in FILES:
            for node in ast.parse(archive.read(file)).body:
                for each in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None:
                        owner = BASES.get(node.name, node.name)  # type: ignore[attr-defined]
                        found[owner, each.target.id] = _literal(each.value)
    return found


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _signs(which: str) -> dict[str, Sign]:
    return {f"{feature.name}-{sign.key}": sign for feature in FEATURES for sign in getattr(feature, which)}


def test_each_field_is_in_some_release_and_off_by_default(wheel: Wheels) -> None:
    """So a release without the field has no such feature."""
    releases = [_fields(wheel("megatron-core", version)) for version in RELEASES]
    for name, sign in {**_signs("config"), **_signs("shows")}.items():
        defaults = [fields[sign.of, sign.key] for fields in releases if (sign.of, sign.key) in fields]
        assert defaults or sign.key in IN_NO_CLASS, f"{name}: no release has the field"
        assert {_of_value(sign, default) for default in defaults} <= {Ternary.NO}, f"{name} is on by default"


@pytest.fixture(scope="module")
def parser(megatron_says: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of the newest Megatron-LM by destination: default, switches among their names, all names."""
    return dict(megatron_says(newest(), SUPPORT / "megatron_arguments.py", imported=False))


@pytest.mark.full
@pytest.mark.upstream
def test_each_argument_has_its_recorded_default(parser: dict[str, Any]) -> None:
    gone = {"use_custom_fsdp", "kitchen_config_file", "kitchen_recipe_number", "use_liger_kernel"}
    for name, sign in _signs("arguments").items():
        if sign.key in {PROGRAM, *gone}:
            continue
        assert sign.key in parser, name
        assert (parser[sign.key]["default"],) == sign.default or not sign.default, name
    switches = [each for row in parser.values() for each in row["switches"]]
    assert [each for each in switches if _TAKES_A_VALUE.fullmatch(each)] == []


# --- objects ---


@pytest.fixture(scope="module")
def real(megatron_says: Callable[..., Any]) -> dict[str, Any]:
    return dict(megatron_says(newest(), SUPPORT / "real_configs.py", MEGACPP_OVERLAYS="off"))


LATENT = {
    *("mla", "experts", "tensor_parallel", "sequence_parallel", "seq_aux_loss", "z_loss", "mtp", "half", "recompute"),
    "per_token_loss",
}


@pytest.mark.upstream
def test_real_objects_of_a_process_decide_its_features(real: dict[str, Any]) -> None:
    dense, latent, hybrid = (real[name]["process"] for name in ("dense", "latent", "hybrid"))

    assert {*latent["yes"]} == LATENT | {"distributed_optimizer"}
    assert {*LATENT} <= {*dense["no"]}
    assert {"mamba_mixer", "hybrid", "gated_delta", "dsa", "qk_clip", "attention_sinks"} <= {*dense["no"]}
    assert {*hybrid["yes"]} == {"mamba_mixer", "mamba"}, "the layer shows them, and the configuration does not"
    for each in (dense, latent, hybrid):
        assert {"packed", "liger_loss", "mamba3", "megatron_fsdp"} <= {*each["undecided"]}
    assert real["latent"]["origin"] == "MLATransformerConfig of this process"
    assert real["nothing is left"]


@pytest.mark.upstream
def test_a_real_repr_decides_the_features_of_its_fields(real: dict[str, Any]) -> None:
    dense, latent = (real[name]["repr"] for name in ("dense", "latent"))

    assert {*latent["yes"]} == LATENT
    assert {*LATENT} <= {*dense["no"]}
    assert {"distributed_optimizer", "mamba_mixer", "hybrid", "optimizer_offload"} <= {*dense["undecided"]}


# --- packs ---

PACKS = [f"{number:02}" for number in (21, 22, 23, 25, 30, 32, 33, 34, 36, 37, 39, 40, 41, 42, 44, 50, 51)]
"""Packs whose reproducers make configuration objects on a CPU."""


@pytest.mark.upstream
@pytest.mark.unmeasured_children
@pytest.mark.parametrize(
    "pack", [each if each == "34" else pytest.param(each, marks=pytest.mark.full) for each in PACKS]
)
def test_no_predicate_rules_out_the_model_that_the_reproducer_of_its_pack_builds(
    pack: str, megatron_says: Callable[..., Any]
) -> None:
    """The defect shows with these objects, so a no would be wrong."""
    said = megatron_says(newest(), SUPPORT / "recorded_configs.py", pack, MEGACPP_OVERLAYS="off")
    predicates = {each.id: each.concerns for each in registry.load()}

    made = {overlay: objects for overlay, objects in said.items() if objects}

    assert made, f"pack {pack} makes no configuration object any more"
    for overlay, objects in made.items():
        values = possible(*({key: (value,) for key, value in fields.items()} for _, fields in objects))
        whole = frozenset(name for name, _ in objects)
        found = of_predicate(predicates[overlay], Configuration(pack, Vocabulary.CONFIG, values, whole=whole))
        assert found is not Ternary.NO, f"{overlay}: {predicates[overlay]} is ruled out by {values}"
