"""The probe of local CUDA graphs with recomputed code: trees without a layer of Megatron's."""

from __future__ import annotations

from probing import Texts, ask

from megacpp_overlays.feature_probes.graph_hidden_recompute_grads import GRAPHS, TARGET, probe
from megacpp_overlays.model import Verdict


def test_a_missing_target_is_absent() -> None:
    for text in (None, "class Other: pass"):
        assert ask(probe, Texts({TARGET.module: text})).verdict is Verdict.ABSENT


def test_a_target_from_another_module_is_not_absent() -> None:
    for text in ("from vendor import TransformerLayer\n", "class TransformerLayer(Other): pass\n"):
        texts = Texts({TARGET.module: text, GRAPHS: "class Manager:\n    graphs = ()\n"})
        assert ask(probe, texts).verdict is Verdict.UNRECOGNISED
