"""The probe for calls that do not pass explicit groups on: edits of the newest release."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import archive, edited_release
from probing import Texts, ask

from megacpp_overlays.feature_probes import explicit_tp_groups as feature
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree

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
CALLERS = (
    feature.CROSS,
    feature.LATENT,
    feature.LLAVA,
    feature.PREDICTION,
    feature.LAYERS,
    feature.OLD_LAYERS,
    feature.CHECKPOINT,
)
NEWEST = "0.19.2"


def edited(probe: str, module: str, old: str, new: str, *, release: str = NEWEST) -> Finding:
    return ask(PROBES[probe], edited_release(module, old, new, release=release))


def test_given_trees_are_recognised(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        for name, probe in PROBES.items():
            assert ask(probe, DirectoryTree(path)).verdict is not Verdict.UNRECOGNISED, (path, name)


@pytest.mark.parametrize("name", PROBES)
def test_what_is_not_there_is_absent(name: str) -> None:
    assert ask(PROBES[name], Texts({})).verdict is Verdict.ABSENT


def test_the_helper_is_left_alone_where_nothing_hands_work_on_without_a_group() -> None:
    modules = {each.module: None for each in CALLERS}

    assert ask(feature.probe, Texts(modules, archive(f"megatron_core-{NEWEST}"))).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    ("probe", "module", "old", "new"),
    [
        ("helper", feature.DEFAULT.module, f"def {feature.HELPER}(", f"@other\ndef {feature.HELPER}("),
        ("helper", feature.DEFAULT.module, "    if tp_group is None:\n", "    if tp_group is None and not is_told():\n"),
        ("cross", feature.CROSS.module, "        self.linear_q = ", "        self.linear_q = self.first = "),
        ("cross", feature.CROSS.module, "class CrossAttention(Attention)", "@other\nclass CrossAttention(Attention)"),
        ("latent", feature.LATENT.module, "                q_compressed = gather_from", "                q_compressed = other_gather_from"),
        ("latent", feature.LATENT.module, "            kv_combined = gather_from", "            kv_combined = other_gather_from"),
        ("latent", feature.LATENT.module, "class MLASelfAttention(MultiLatentAttention):\n", "class MLASelfAttention(MultiLatentAttention):\n    def forward(self): ...\n\n"),
        ("latent", "megatron.core.tensor_parallel.mappings", "_GatherFromModelParallelRegion.apply(input_, group)", "other(input_, group)"),
        ("llava", feature.LLAVA.module, "        if self.sequence_parallel_lm and self.pre_process:\n            combined", "        if self.sequence_parallel_lm:\n            combined"),
        ("prediction", feature.PREDICTION.module, "                return tensor_parallel.checkpoint(", "                return other.checkpoint("),
        ("layers", feature.LAYERS.module, "hidden_states, context = tensor_parallel.checkpoint(", "hidden_states, context = other.checkpoint("),
        ("checkpoint", feature.CHECKPOINT.module, "split_tensor_into_1d_equal_chunks(args[0].data, new_buffer=True)", "cut(args[0].data)"),
        ("checkpoint", feature.CHECKPOINT.module, "\ndef checkpoint(", "\nCheckpointFunction.backward = other\n\n\ndef checkpoint("),
        ("checkpoint", "megatron.core.tensor_parallel.utils", "    numel_gathered = ", "    numel_gathered = 1 * "),
    ],
)  # fmt: skip
def test_all_that_a_seam_relies_on_must_be_as_it_was_read(probe: str, module: str, old: str, new: str) -> None:
    assert edited(probe, module, old, new).verdict is Verdict.UNRECOGNISED
