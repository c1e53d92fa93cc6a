"""The probe of pack 03 on releases, on trees of no release, and on unknown dispatchers."""

from __future__ import annotations

from pathlib import Path

import pytest
from probing import ask

from megacpp_overlays.feature_probes import fp8_quantized_unwrap as feature
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import ModuleSource

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
    return ask(feature.probe, Tree(text))


STAND_INS = {
    "sparse_mla_spring": (Verdict.ABSENT, Verdict.BROKEN),
    "sparse_mla_summer": (Verdict.BROKEN, Verdict.ABSENT),
}


def test_trees(tree: Path) -> None:
    """Ours are as they were made; a real one must be known too, whatever it is."""
    source = DirectoryTree(tree)
    findings = ask(feature.probe, source), ask(feature.probe_spring, source)
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
    "declines without a value": (
        "    if isinstance(query, QuantizedTensor):\n        return\n"
        "    if isinstance(key, QuantizedTensor):\n        return\n"
    ),
    "dequantizes": (
        "    if isinstance(query, QuantizedTensor):\n        query = query.dequantize(dtype=torch.bfloat16)\n"
        "    if isinstance(key, QuantizedTensor):\n        key = key.dequantize()\n"
    ),
    "dequantizes in an expression": (
        "    query = query.dequantize() if isinstance(query, QuantizedTensor) else query\n"
        "    key = key.dequantize(dtype=query.dtype) if isinstance(key, QuantizedTensor) else key\n"
    ),
}


@pytest.mark.parametrize("how", HANDLED)
def test_a_dispatcher_that_asks_for_both_is_not_recognised(how: str) -> None:
    assert changed((START, START + HANDLED[how])).verdict is Verdict.UNRECOGNISED


IMPORT = "from transformer_engine.pytorch import QuantizedTensor\n"
KERNEL_IMPORT = f"from {feature.KERNEL_MODULE} import SparseMLA\n"
DEQUANTIZES = HANDLED["dequantizes"]

NOT_A_REPAIR = {
    "hands on": [(START, START + HANDLED["declines"].replace("return None", "return fp8_unsafe(query, key)"))],
    "a launch before the question": [
        (START, START + "    if v_channels:\n        return two_pass(query, key)\n" + HANDLED["declines"])
    ],
    "a launch in the question": [
        (START, START + HANDLED["declines"].replace(" or ", " or two_pass(query, key) or ")),
    ],
    "quantized again": [(START, START + DEQUANTIZES + "    query = quantizer(query)\n")],
    "the old one again": [(START, START + "    raw = query\n" + DEQUANTIZES + "    query = raw\n")],
    "another one after it": [(START, START + DEQUANTIZES + "    query = topk_indices\n")],
    "one asked for too late": [("    out, _ =", DEQUANTIZES + "    out, _ =")],
    "the class is bound again": [(IMPORT, IMPORT + "QuantizedTensor = ()\n"), (START, START + HANDLED["declines"])],
    "the class is imported twice": [(IMPORT, IMPORT * 2), (START, START + HANDLED["declines"])],
    "the class is imported for types only": [
        (IMPORT, f"if TYPE_CHECKING:\n    {IMPORT}"),
        (START, START + HANDLED["declines"]),
    ],
    "into another type": [(START, START + DEQUANTIZES.replace("torch.bfloat16", "torch.float32"))],
    "a repair around an unknown kernel": [
        (START, START + HANDLED["declines"]),
        ("ops.sparse_mla import", "ops.fp8_sparse_mla import"),
    ],
}

BOUND_AGAIN = {
    "kernel, wrapped": KERNEL_IMPORT + "SparseMLA = AwareKernel(SparseMLA)\n",
    "kernel, wrapped in a branch": KERNEL_IMPORT
    + "if SparseMLA is not None:\n    SparseMLA = AwareKernel(SparseMLA)\n",
    "kernel, of another module": KERNEL_IMPORT + "SparseMLA = other_mod.SparseMLA\n",
    "kernel, a class": KERNEL_IMPORT + "class SparseMLA(SparseMLA):\n    pass\n",
    "kernel, a function": KERNEL_IMPORT + "def SparseMLA(): ...\n",
    "kernel, imported under its name": KERNEL_IMPORT + "from other import Aware as SparseMLA\n",
    "kernel, perhaps by a star": KERNEL_IMPORT + "from other import *\n",
    "kernel, its attribute": KERNEL_IMPORT + "SparseMLA.apply = aware\n",
    "kernel, by setattr": KERNEL_IMPORT + "setattr(SparseMLA, 'apply', aware)\n",
    "kernel, by its name as text": KERNEL_IMPORT + "globals()['SparseMLA'] = aware\n",
    "kernel, deleted": KERNEL_IMPORT + "del SparseMLA\n",
    "kernel, in a function": KERNEL_IMPORT + "def arm():\n    global SparseMLA\n    SparseMLA = aware\n",
    "kernel, another fallback": f"try:\n    {KERNEL_IMPORT}except ImportError:\n    SparseMLA = Aware\n",
    "kernel, imported in a branch": f"if x:\n    {KERNEL_IMPORT}",
    "guard": KERNEL_IMPORT + "_all_bfloat16 = strict_bf16\n",
    "guard, twice": KERNEL_IMPORT + "def _all_bfloat16(*tensors): ...\n",
    "guard, imported": KERNEL_IMPORT + "from other import _all_bfloat16\n",
}

NOT_KNOWN = {
    **NOT_A_REPAIR,
    **{f"bound again: {how}": [(KERNEL_IMPORT, text)] for how, text in BOUND_AGAIN.items()},
    "the guard is decorated": [("def _all_bfloat16", "@plain_only\ndef _all_bfloat16")],
    "a class is looked at": [
        (START, START + "    if query.__class__ is not torch.Tensor:\n        return None\n"),
    ],
    "an attribute of a wrapper is looked at": [
        (START, START + "    if query.is_wrapper or key.is_wrapper:\n        return None\n"),
    ],
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


@pytest.mark.parametrize("form", NOT_KNOWN)
def test_an_unknown_form_is_not_recognised(form: str) -> None:
    finding = changed(*NOT_KNOWN[form])
    assert finding.verdict is Verdict.UNRECOGNISED, finding


def test_the_kernel_may_be_missing() -> None:
    finding = changed(
        (KERNEL_IMPORT, f"try:\n    {KERNEL_IMPORT}except (ImportError, OSError):\n    SparseMLA = None\n")
    )
    assert (finding.verdict, finding.shape) == (Verdict.BROKEN, feature.GUARD_FOOLED)


def test_a_kernel_that_knows_of_quantized_tensors_is_not_recognised() -> None:
    kernel = "class SparseMLA:\n    def forward(ctx, q):\n        return q.dequantize()\n"
    assert ask(feature.probe, Tree(DISPATCHER, kernel)).verdict is Verdict.UNRECOGNISED
    assert ask(feature.probe, Tree(DISPATCHER, kernel.replace("dequantize", "contiguous"))).verdict is Verdict.BROKEN


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
    assert ask(feature.probe, Tree(text)).verdict is Verdict.ABSENT
    assert ask(feature.probe_spring, Tree(text, module=feature.SPRING_TARGET.module)).verdict is Verdict.ABSENT
