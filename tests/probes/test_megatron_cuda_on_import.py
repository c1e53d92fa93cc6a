"""The gate of pack 20 finds questions about a device that are asked by an import."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import tree_of
from probing import ask

from megacpp_overlays.feature_probes.megatron_cuda_on_import import WITH_HYBRID_MODELS, WITH_THE_PACKAGE, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.megatron_cuda_on_import import OVERLAY
from megacpp_overlays.source.file_trees import DirectoryTree

COMMON = "megatron/core/ssm/ops/gdp/common.py"
CONTEXT = "megatron/core/inference/contexts/dynamic_context.py"
REACHES = "from megatron.core.ssm.ops.gdp.metadata import max_gdp_chunk_counts\n"


def tree(root: Path, **files: str) -> DirectoryTree:
    for name, text in files.items():
        path = root / {"common": COMMON, "context": CONTEXT}[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return DirectoryTree(root)


@pytest.mark.upstream
@pytest.mark.parametrize("lane", ["spring-2026", "edge"])
def test_no_release_has_the_module(lane: str) -> None:
    assert ask(probe, tree_of(lane)).verdict is Verdict.ABSENT


@pytest.mark.parametrize(
    "asks",
    [
        "HOPPER = torch.cuda.get_device_capability()[0] >= 9",
        "if torch.cuda.is_available():\n    NAME = torch.cuda.get_device_name(0)",
        "class Limits:\n    properties = torch.cuda.get_device_properties(0)",
        "BIG = IS_NVIDIA and ('H' in torch.cuda.get_device_name(0) or other())",
        "def hopper():\n    return torch.cuda.get_device_capability(0)[0] >= 9\n\nHOPPER = hopper()",
        "def major():\n    return torch.cuda.get_device_capability()\n\ndef hopper():\n    return major()[0] >= 9\n\nA = hopper()",
        "from torch.cuda import get_device_capability as ask\nMAJOR = ask()[0]",
        "DEVICE = torch.cuda.current_device()",
        "@tuned(torch.cuda.get_device_name(0))\ndef kernel():\n    pass",
        "def kernel(name=torch.cuda.get_device_name(0)):\n    pass",
        "try:\n    A = torch.cuda.get_device_name(0)\nexcept RuntimeError:\n    A = None",
    ],
)
def test_a_question_that_an_import_asks_is_found(tmp_path: Path, asks: str) -> None:
    found = ask(probe, tree(tmp_path, common=asks, context=REACHES))

    assert (found.verdict, found.shape) == (Verdict.BROKEN, WITH_THE_PACKAGE)
    assert set(OVERLAY.unsupported) == {WITH_THE_PACKAGE, WITH_HYBRID_MODELS}


@pytest.mark.parametrize("context", ["", "def later():\n    " + REACHES])
def test_before_the_contexts_reached_it_only_hybrid_models_did(tmp_path: Path, context: str) -> None:
    found = ask(probe, tree(tmp_path, common="A = torch.cuda.get_device_name(0)", context=context))

    assert found.shape == WITH_HYBRID_MODELS


@pytest.mark.parametrize(
    "text",
    [
        "def hopper():\n    return torch.cuda.get_device_capability()[0] >= 9",
        "hopper = lambda: torch.cuda.get_device_capability()[0] >= 9",
        "class Limits:\n    def properties(self):\n        return torch.cuda.get_device_properties(0)",
        "A = torch.cuda.is_available()",
    ],
)
def test_a_module_that_does_not_seem_to_ask_is_not_recognised(tmp_path: Path, text: str) -> None:
    found = ask(OVERLAY.probe, tree(tmp_path, common=text, context=REACHES))

    assert found.verdict is Verdict.UNRECOGNISED
    assert "nothing is seen to ask" in found.summary()


def test_a_text_that_cannot_be_parsed_is_not_recognised(tmp_path: Path) -> None:
    assert ask(probe, tree(tmp_path, common="def (", context=REACHES)).verdict is Verdict.UNRECOGNISED


def test_main_asks_when_it_is_given(upstream_trees: list[Path]) -> None:
    found = [each for each in upstream_trees if (each / COMMON).exists()]
    if not found:
        pytest.skip("no tree with the module was given")
    for each in found:
        assert ask(probe, DirectoryTree(each)).verdict in {Verdict.BROKEN, Verdict.FIXED}
