"""What the probe of pack 03 says of releases, of trees that are in no release, and of dispatchers that nobody wrote yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_overlays.feature_probes import fp8_quantized_unwrap as feature
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source import DirectoryTree, ModuleSource, WheelTree

RELEASES = {
    **dict.fromkeys(["0.14.0", "0.15.0", "0.15.3", "0.16.1", "0.17.1", "0.18.0", "0.18.2"], Verdict.ABSENT),
    **dict.fromkeys(["0.19.0", "0.19.2"], Verdict.BROKEN),
}

DISPATCHER = """
import torch
from transformer_engine.pytorch import QuantizedTensor
from megatron.core.transformer.experimental_attention_variant.ops.sparse_mla import SparseMLA

def _all_bfloat16(*tensors):
    return all(tensor.dtype == torch.bfloat16 for tensor in tensors)

def fused_sparse_mla_absorbed(query, key, topk_indices, softmax_scale, v_channels):
    if SparseMLA is None:
        return None
    if not _all_bfloat16(query, key):
        return None
    q = query.permute(1, 0, 2, 3).contiguous()
    kv = key.permute(1, 0, 2, 3).contiguous()
    out, _ = SparseMLA.apply(q, kv, topk_indices.unsqueeze(2), softmax_scale)
    return out.permute(1, 0, 2, 3).contiguous()
"""
START = "    if SparseMLA is None:\n        return None\n"


class Tree:
    """A tree of one module, and of the kernel's where a text is given for it."""

    def __init__(self, text: str, kernel: str | None = None, module: str = feature.TARGET.module) -> None:
        self._texts = {module: text} | ({feature.KERNEL_MODULE: kernel} if kernel is not None else {})

    def module(self, name: str) -> ModuleSource | None:
        text = self._texts.get(name)
        return None if text is None else ModuleSource(name, f"{name}.py", text)


def changed(*pairs: tuple[str, str]) -> Finding:
    text = DISPATCHER
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return feature.probe(Tree(text))


@pytest.mark.parametrize("release", RELEASES)
def test_releases(release: str, wheel: Callable[[str, str], Path]) -> None:
    tree = WheelTree(wheel("megatron-core", release))
    finding = feature.probe(tree)
    assert finding.verdict is RELEASES[release], finding.summary()
    assert finding.shape == (feature.GUARD_FOOLED if finding.verdict is Verdict.BROKEN else None)
    assert feature.probe_spring(tree).verdict is Verdict.ABSENT
    tree.close()


STAND_INS = {
    "sparse_mla_spring": (Verdict.ABSENT, Verdict.BROKEN),
    "sparse_mla_summer": (Verdict.BROKEN, Verdict.ABSENT),
}


def test_trees(tree: Path) -> None:
    """Ours are as they were made; a real one must be known too, whatever it is."""
    source = DirectoryTree(tree)
    findings = feature.probe(source), feature.probe_spring(source)
    verdicts = tuple(finding.verdict for finding in findings)
    assert Verdict.UNRECOGNISED not in verdicts, findings
    if tree.name in STAND_INS:
        assert verdicts == STAND_INS[tree.name]
        assert {finding.shape for finding in findings} == {None, feature.PER_BATCH}


def test_the_silent_form() -> None:
    finding = changed()
    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, feature.GUARD_FOOLED)
    assert finding.evidence[0].line == 16


HANDLED = {
    "declines": "    if isinstance(query, QuantizedTensor) or isinstance(key, QuantizedTensor):\n        return None\n",
    "hands on": (
        "    if isinstance(query, QuantizedTensor) or isinstance(key, QuantizedTensor):\n"
        "        return fp8_sparse_mla(query, key, topk_indices, softmax_scale, v_channels)\n"
    ),
    "dequantizes": (
        "    if isinstance(query, QuantizedTensor):\n        query = query.dequantize(dtype=torch.bfloat16)\n"
        "    if isinstance(key, QuantizedTensor):\n        key = key.dequantize()\n"
    ),
    "dequantizes in an expression": (
        "    query = query.dequantize() if isinstance(query, QuantizedTensor) else query\n"
        "    key = key.dequantize() if isinstance(key, QuantizedTensor) else key\n"
    ),
}


@pytest.mark.parametrize("how", HANDLED)
def test_a_dispatcher_that_asks_for_both_is_fixed(how: str) -> None:
    assert changed((START, START + HANDLED[how])).verdict is Verdict.FIXED


NOT_KNOWN = {
    "one of two is asked for": [(START, START + "    if isinstance(query, QuantizedTensor):\n        return None\n")],
    "asked for after the kernel ran": [
        ("    return out.permute", HANDLED["declines"] + "    return out.permute"),
    ],
    "asked for under a condition": [
        (START, START + "    if v_channels:\n        if isinstance(query, QuantizedTensor):\n            return None\n")
    ],
    "asked for with something else": [
        (START, START + HANDLED["declines"].replace(":\n", " or v_channels and isinstance(query, FP8):\n", 1)),
        ("isinstance(key, QuantizedTensor)", "isinstance(key, Other)"),
    ],
    "another class of that name": [
        ("from transformer_engine.pytorch", "from somewhere"),
        (START, START + HANDLED["declines"]),
    ],
    "a helper of upstream's": [(START, START + "    query, key = unwrap_fp8(query, key)\n")],
    "an unknown call": [(START, START + "    query = prepare(query)\n")],
    "a payload is touched": [(START, START + "    query = getattr(query, '_data', query)\n")],
    "an unknown method": [("query.permute(1, 0, 2, 3)", "query.transpose(0, 1)")],
    "the guard asks more": [("tensor.dtype == torch.bfloat16", "type(tensor) is torch.Tensor")],
    "there is no guard": [("    if not _all_bfloat16(query, key):\n        return None\n", "")],
    "the kernel gets both from one tensor": [("key.permute", "query.permute")],
    "the kernel gets one of each form": [("key.permute(1, 0, 2, 3)", "key[:, i]")],
    "the kernel is called twice": [("    return out", "    out, _ = SparseMLA.apply(q, kv, out, 1.0)\n    return out")],
    "the kernel takes one more": [("softmax_scale)\n    return", "softmax_scale, v_channels)\n    return")],
    "another kernel of that name": [("ops.sparse_mla import SparseMLA", "ops.fp8_sparse_mla import SparseMLA")],
    "one more parameter": [("v_channels):", "v_channels, topk_length=None):")],
    "decorated": [("def fused_sparse", "@functools.cache\ndef fused_sparse")],
    "bound again": [
        ("    return out.permute(1, 0, 2, 3).contiguous()\n", "    return out\n\nfused_sparse_mla_absorbed = x\n")
    ],
    "defined in a branch": [
        ("def _all_bfloat16", "if x:\n    def fused_sparse_mla_absorbed(): ...\n\ndef _all_bfloat16")
    ],
    "it no longer begins with a refusal": [(START, "")],
    "it does not parse": [("import torch\n", "import torch !\n")],
}


@pytest.mark.parametrize("what", NOT_KNOWN)
def test_what_was_not_read_is_not_recognised(what: str) -> None:
    finding = changed(*NOT_KNOWN[what])
    assert finding.verdict is Verdict.UNRECOGNISED, finding


def test_a_kernel_that_knows_of_quantized_tensors_is_not_recognised() -> None:
    kernel = "class SparseMLA:\n    def forward(ctx, q):\n        return q.dequantize()\n"
    assert feature.probe(Tree(DISPATCHER, kernel)).verdict is Verdict.UNRECOGNISED
    assert feature.probe(Tree(DISPATCHER, kernel.replace("dequantize", "contiguous"))).verdict is Verdict.BROKEN


def test_padding_that_a_later_upstream_adds_changes_nothing() -> None:
    """As pull request 7617 does, for 512 channels and any number of indices."""
    pads = (
        "    if query.size(-1) == 512:\n"
        "        query = torch.nn.functional.pad(query, (0, 64))\n"
        "        key = torch.nn.functional.pad(key, (0, 64))\n"
    )
    finding = changed((START, START + pads))
    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, feature.GUARD_FOOLED)


def test_a_module_that_only_mentions_the_name_in_another_is_absent() -> None:
    text = DISPATCHER.replace("fused_sparse_mla_absorbed", "run_fused_sparse_mla_absorbed")
    assert feature.probe(Tree(text)).verdict is Verdict.ABSENT
    assert feature.probe_spring(Tree(text, module=feature.SPRING_TARGET.module)).verdict is Verdict.ABSENT
