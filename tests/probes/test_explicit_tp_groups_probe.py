"""Whether work is handed on without explicit groups: every release, and edits of the newest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import Texts, ask
from repair_cases import CASES, archive, edited_release

from megacpp_overlays.feature_probes import explicit_tp_groups as feature
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree

pytestmark = pytest.mark.upstream

PROBES = {
    "helper": feature.probe,
    "cross": feature.probe_cross,
    "latent": feature.probe_latent,
    "llava": feature.probe_llava,
    "prediction": feature.probe_prediction,
    "layers": feature.probe_layers,
    "old layers": feature.probe_old_layers,
    "checkpoint": feature.probe_checkpoint,
}
WITHOUT = (
    *("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "0.9.0", "0.10.0", "0.11.0"),
    *("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
)
_ALWAYS = {"helper": feature.UNTOLD, "cross": feature.PROJECTIONS, "checkpoint": feature.PIECES}
_OLD = {**_ALWAYS, "old layers": feature.STACK}
_0_13 = {**_OLD, "latent": feature.ATTENTION}
_0_14 = {**_0_13, "llava": feature.EMBEDDINGS}
_0_16 = {**_0_14, "latent": feature.LATENTS}
_0_17 = {**_0_16, "prediction": feature.SAVED}
_0_18 = {**_ALWAYS, "layers": feature.STACK, "latent": feature.LATENTS, "llava": feature.EMBEDDINGS}
_0_19 = {**_0_18, "prediction": feature.SAVED}
SHAPES = {
    **dict.fromkeys(("0.13.0", "0.13.1"), _0_13),
    **dict.fromkeys(("0.14.0", "0.15.0", "0.15.1", "0.15.2", "0.15.3"), _0_14),
    **dict.fromkeys(("0.16.0", "0.16.1"), _0_16),
    **dict.fromkeys(("0.17.0", "0.17.1"), _0_17),
    **dict.fromkeys(("0.18.0", "0.18.1", "0.18.2"), _0_18),
    **dict.fromkeys(("0.19.0", "0.19.1", "0.19.2"), _0_19),
}
"""What is broken in a release; all else is absent."""
NEWEST = "0.19.2"
Wheel = Callable[[str, str], Path]


def edited(probe: str, module: str, old: str, new: str, *, release: str = NEWEST) -> Finding:
    return ask(PROBES[probe], edited_release(module, old, new, release=release))


@pytest.mark.parametrize("version", WITHOUT)
def test_releases_in_which_nothing_takes_groups_are_absent(version: str, wheel: Wheel) -> None:
    tree = ArchiveTree(wheel("megatron-core", version))

    assert {probe(tree).verdict for probe in PROBES.values()} == {Verdict.ABSENT}


@pytest.mark.parametrize("version", SHAPES)
def test_every_release_since_is_broken_where_it_was_seen(version: str, wheel: Wheel) -> None:
    tree = ArchiveTree(wheel("megatron-core", version))
    found = {name: probe(tree) for name, probe in PROBES.items()}

    assert {name: each.shape for name, each in found.items() if each.verdict is Verdict.BROKEN} == SHAPES[version]
    assert {each.verdict for name, each in found.items() if name not in SHAPES[version]} == {Verdict.ABSENT}


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        for name, probe in PROBES.items():
            assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, (path, name)


@pytest.mark.parametrize("name", PROBES)
def test_what_is_not_there_is_absent(name: str) -> None:
    assert ask(PROBES[name], Texts({})).verdict is Verdict.ABSENT


def test_the_helper_is_left_alone_where_nothing_hands_work_on_without_a_group() -> None:
    modules = {each.target.module: None for each in feature.CALLERS}

    assert ask(feature.probe, Texts(modules, archive(f"megatron_core-{NEWEST}"))).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    ("probe", "module", "old", "new"),
    [
        ("helper", feature.DEFAULT.module, f"def {feature.HELPER}(", f"@other\ndef {feature.HELPER}("),
        ("helper", feature.DEFAULT.module, "    if tp_group is None:\n", "    if tp_group is None and not is_told():\n"),
        ("cross", feature.CROSS.target.module, "        self.linear_q = ", "        self.linear_q = self.first = "),
        ("cross", feature.CROSS.target.module, "class CrossAttention(Attention)", "@other\nclass CrossAttention(Attention)"),
        ("latent", feature.LATENT.target.module, "                q_compressed = gather_from", "                q_compressed = other_gather_from"),
        ("latent", feature.LATENT.target.module, "            kv_combined = gather_from", "            kv_combined = other_gather_from"),
        ("latent", feature.LATENT.target.module, "class MLASelfAttention(MultiLatentAttention):\n", "class MLASelfAttention(MultiLatentAttention):\n    def forward(self): ...\n\n"),
        ("latent", "megatron.core.tensor_parallel.mappings", "_GatherFromModelParallelRegion.apply(input_, group)", "other(input_, group)"),
        ("llava", feature.LLAVA.target.module, "        if self.sequence_parallel_lm and self.pre_process:\n            combined", "        if self.sequence_parallel_lm:\n            combined"),
        ("prediction", feature.PREDICTION.target.module, "                return tensor_parallel.checkpoint(", "                return other.checkpoint("),
        ("layers", feature.LAYERS.target.module, "hidden_states, context = tensor_parallel.checkpoint(", "hidden_states, context = other.checkpoint("),
        ("checkpoint", feature.CHECKPOINT.target.module, "split_tensor_into_1d_equal_chunks(args[0].data, new_buffer=True)", "cut(args[0].data)"),
        ("checkpoint", feature.CHECKPOINT.target.module, "\ndef checkpoint(", "\nCheckpointFunction.backward = other\n\n\ndef checkpoint("),
        ("checkpoint", "megatron.core.tensor_parallel.utils", "    numel_gathered = ", "    numel_gathered = 1 * "),
    ],
)  # fmt: skip
def test_all_that_a_seam_relies_on_must_be_as_it_was_read(probe: str, module: str, old: str, new: str) -> None:
    assert edited(probe, module, old, new).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("name", ["groups of cross attention", "groups of embeddings"])
def test_what_hands_a_group_on_looks_repaired(name: str) -> None:
    case = CASES[name]

    finding = case.ask(case.texts())

    assert (finding.verdict, finding.looks_repaired) == (Verdict.UNRECOGNISED, True)
