"""Repairs in a few lines, for probes whose repair no release has, each with edits that leave or bring back the defect."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from places import WHEELS
from probing import Texts, as_if_read, ask, places_of
from trees import STAND_INS

from megacpp_overlays.feature_probes import (
    dsa_branchless_scatter,
    dsa_capture_gates,
    dsa_indexer_streaming,
    float16_distributed_order,
    float16_fp32_exemption,
    float16_mixer_parameters,
    float16_optimizer_state_ids,
    fp8_quantized_unwrap,
    hopper_flce_dispatch,
    hybrid_linear_ce,
    mamba3_mimo_gqa_backward,
    mamba3_siso_pipelining,
    megatron_cuda_on_import,
)
from megacpp_overlays.feature_probes.repairs import Repairs
from megacpp_overlays.fp32_marks import MAMBA3, MAMBA3_ALWAYS, MAMBA3_MIMO
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import ArchiveTree
from megacpp_overlays.source.trees import SourceTree

Edit = tuple[str, str] | tuple[str, str, str]
"""Old and new text of the target, or of the module that is named first."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A repair in a few lines, and edits that leave or bring back the defect."""

    feature: ModuleType
    target: str
    texts: Callable[[], Mapping[str, str | None]]
    edits: Mapping[str, Edit]
    probe: str = "probe"
    tree: Callable[[], SourceTree | None] = lambda: None
    learnt: Callable[[Repairs], object] = lambda known: known

    def ask(self, texts: Mapping[str, str | None]) -> Finding:
        return ask(getattr(self.feature, self.probe), Texts(texts, self.tree()))

    def edited(self, edit: Edit) -> dict[str, str | None]:
        module, old, new = edit if len(edit) == 3 else (self.target, *edit)
        texts = dict(self.texts())
        before = texts[module]
        assert before is not None
        assert old in before
        return {**texts, module: before.replace(old, new, 1)}

    def to_learn(self) -> object:
        """Return the table that the probe would have if somebody had read the repair; None where it knows it."""
        first = self.ask(self.texts())
        if first.verdict is Verdict.FIXED:
            return None
        places = places_of(first)
        if self.feature is float16_distributed_order:
            places.append(f"{self.target}:*model_param_group_index_map")
        if self.feature is mamba3_mimo_gqa_backward:
            places = [f"{self.target}:", f"{mamba3_mimo_gqa_backward.REDUCER}:"]
        return self.learnt(as_if_read(Texts(self.texts(), self.tree()), *places))


@functools.cache
def released(archive: str, module: str) -> str:
    source = _archive(archive).module(module)
    assert source is not None
    return source.text


@functools.cache
def _archive(prefix: str) -> ArchiveTree:
    found = sorted(WHEELS.glob(f"{prefix}*"))
    if not found:
        pytest.skip(f"no {prefix} in {WHEELS}")
    return ArchiveTree(found[0])


IDS = """
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict()}

    def sharded_state_dict(self, model, is_loading=False, metadata=None):
        def in_order():
            for group in self.optimizer.param_groups:
                yield from map(self.model_side, group["params"])
                yield None
        ids = get_param_id_to_sharded_param_map(model, in_order())
        return convert(self.state_dict(), ids)
"""
SHARDING = "def get_param_id_to_sharded_param_map(model, parameters):\n    return dict(enumerate(parameters))\n"
ORDER = """
class DistributedOptimizer(MixedPrecisionOptimizer):
    def __init__(self, *args):
        self.build(*args)
        for index, (native, half) in enumerate(zip(self.model_fp32_groups, self.model_float16_groups)):
            for place, parameter in enumerate([*native, *half]):
                self.model_param_group_index_map[parameter] = (index, place)

    def _build_optimizer_group_ranges(self):
        return {}

    def _build_model_and_main_param_groups(self):
        return [*self.native, *self.half]

    def _set_main_param_and_optimizer_states(self, parameter, tensors):
        with torch.no_grad():
            self.shard(parameter).copy_(tensors["param"])
"""
LINEAR = "class LinearCrossEntropyModule(ColumnParallelLinear):\n    def forward(self, x):\n        return fused(x)\n"
MODEL = """
from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule


class {name}:
    def __init__(self, config):
        self.fused = config.cross_entropy_fusion_impl == "linear"
        self.output_layer = LinearCrossEntropyModule(config)

    def forward(self, hidden, labels):
        if self.fused:
            loss = self.output_layer(hidden, output_cross_entropy_loss=True, labels=labels)
        else:
            loss = self.compute(self.output_layer(hidden), labels)
        return loss
"""
MODEL_EDITS: dict[str, Edit] = {
    "never fused": ('== "linear"', '== "never"'),
    "loss discarded": ("loss = self.output_layer(hidden, output", "loss = 0 * self.output_layer(hidden, output"),
    "layer replaced": ("LinearCrossEntropyModule(config)\n", "LinearCrossEntropyModule(config)\n        self.output_layer = Plain()\n"),
    "in the layer": (hybrid_linear_ce.LINEAR, "fused(x)", "super().forward(x)"),
    "layer from elsewhere": ("from megatron.core.transformer.linear", "from vendor.linear"),
    "class rebound": ("\n\nclass ", "\n\nfrom vendor import *\n\nclass "),
}  # fmt: skip
_GROUPED = "reduce_grouped_qk_grads_and_bias_triton"
MIMO = "".join(
    [
        f"from {mamba3_mimo_gqa_backward.REDUCER} import {_GROUPED}\n",
        *(
            f"@jit\ndef {name}(H, G):\n    def kernel():\n        i_h_qk = i_h // (H // G)\n    return kernel\n"
            for name in mamba3_mimo_gqa_backward.FACTORIES
        ),
        f"def {mamba3_mimo_gqa_backward.PLAIN.symbol}(q):\n    B, S, R, G, N = q.shape\n    launch(dq_raw, dk_raw)\n",
        f"    dq, dk, dqb, dkb = {_GROUPED}(dq_raw, dk_raw, G)\n",
        "    return (dq, dk, dv, ddA, ddt, dtrap, dqb, dkb, dmimo_v)\n",
    ]
)
CONVERSION = '''
def convert_module_to_dtype_except_fp32_marked(module, dtype):
    """Cast what is floating and carries no mark."""
    return module._apply(
        lambda each: each.to(dtype) if each.is_floating_point() and not getattr(each, "keep_in_fp32", False) else each
    )


'''
MARKER = "def mark_keep_in_fp32(parameter):\n    parameter.keep_in_fp32 = True\n    return parameter\n\n\n"


def honouring() -> str:
    """The newest release with the casts of main, in our own words."""
    text = released("megatron_core-0.19.2", float16_fp32_exemption.TARGET.module)
    text = text.replace("class Float16Module(", f"{CONVERSION}class Float16Module(")
    for half in ("half", "bfloat16"):
        text = text.replace(f"module.{half}()", f"convert_module_to_dtype_except_fp32_marked(module, torch.{half})")
    return text


def marking() -> str:
    made = [f"self.{name} = make()" for name in (*MAMBA3_ALWAYS, *MAMBA3_MIMO)]
    marks = [f"mark_keep_in_fp32(self.{name})" for name in (*MAMBA3_ALWAYS, *MAMBA3_MIMO)]
    body = textwrap.indent("\n".join([*made, *marks, "self.finish()"]), " " * 8)
    finish = "    def finish(self):\n        pass\n"
    return f"{MARKER}class Mamba3(Module):\n    def __init__(self, is_mimo=False):\n{body}\n\n{finish}"


def mixer() -> str:
    text = released("megatron_core-0.19.2", float16_mixer_parameters.MAMBA.target.module)
    before = "        self.cp = MambaContextParallel("
    marks = "        mark_keep_in_fp32(self.A_log)\n        mark_keep_in_fp32(self.D)\n"
    return text.replace(before, f"{marks}{before}")


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
FP8 = DISPATCHER.replace(
    START,
    f"{START}    if isinstance(query, QuantizedTensor) or isinstance(key, QuantizedTensor):\n        return None\n",
)
PRUNED = """
def keep(configs, named_args, **kwargs):
    major, _ = torch.cuda.get_device_capability(named_args["Q"].device)
    if major in (10, 12):
        return [config for config in configs if config.num_stages == 1]
    return configs


@triton.autotune(
    prune_configs_by={"early_config_prune": keep},"""
FUSION = Path("megatron/core/fusions")


def stand_in(path: Path) -> str:
    return (STAND_INS["dev-linear-cross-entropy"] / path).read_text()


def dispatching() -> dict[str, str | None]:
    entry = "linear_cross_entropy/blackwell/entry.py"
    text = stand_in(FUSION / "fused_linear_cross_entropy.py").replace(
        "capability[0] == 10", "capability[0] in (8, 9, 10, 12)"
    )
    return {
        hopper_flce_dispatch.TARGET.module: text,
        f"{hopper_flce_dispatch.ENTRIES}.blackwell.entry": stand_in(FUSION / entry),
    }


_SISO = mamba3_siso_pipelining.TARGET.module
_MASKING = dsa_branchless_scatter.MASKING.module
_DSA_TEXTS: Callable[[], Mapping[str, str | None]] = lambda: {  # noqa: E731
    name: released("megatron_core-0.19.2", name) for name in (_MASKING, dsa_capture_gates.LAYOUT_TARGET.module)
}
_REBOUND = "\n\nglobals()['{}'] = older\n"
_ENTRY = f"{hopper_flce_dispatch.ENTRIES}.blackwell.entry"
_SHARDING = "megatron.core.dist_checkpointing.optimizer"

CASES = {
    "optimizer ids": Case(
        float16_optimizer_state_ids,
        float16_optimizer_state_ids.TARGET.module,
        lambda: {float16_optimizer_state_ids.TARGET.module: IDS, _SHARDING: SHARDING},
        {
            "discarded": ("ids = get_param_id_to_sharded_param_map(model, in_order())", "get_param_id_to_sharded_param_map(model, in_order())\n        ids = self.stale_ids(model)"),
            "overwritten": ("        return convert(", "        ids = stale(ids)\n        return convert("),
            "half precision only": ('map(self.model_side, group["params"])', '(each for each in group["params"] if each.dtype is not torch.float32)'),
            "under a flag": ("            for group in", "            if FLAG:\n              for group in"),
            "in the helper": (_SHARDING, "enumerate(parameters)", "enumerate(list(parameters)[::2])"),
            "helper from elsewhere": ("from megatron.core.dist", "from vendor.dist"),
            "helper rebound": ("\n\nclass Float16", "\n\nget_param_id_to_sharded_param_map = older\n\n\nclass Float16"),
            "base changed": ("(MixedPrecisionOptimizer)", "(MixedPrecisionOptimizer, Older)"),
            "method rebound": ("        return convert(self.state_dict(), ids)\n", "        return convert(self.state_dict(), ids)\n\n    sharded_state_dict = older(sharded_state_dict)\n"),
        },
    ),
    "distributed order": Case(
        float16_distributed_order,
        float16_distributed_order.TARGET.module,
        lambda: {float16_distributed_order.TARGET.module: ORDER},
        {
            "swapped": ("[*native, *half]", "[*half, *native]"),
            "under a flag": ("        for index, (native", "        if FLAG:\n         for index, (native"),
            "dead loop": ("zip(self.model_fp32_groups, self.model_float16_groups)", "zip(self.model_fp32_groups[:0], self.model_float16_groups)"),
            "before they are built": ("self.build(*args)", "self.built = False"),
            "built in another order": ("[*self.native, *self.half]", "[*self.half, *self.native]"),
            "recorded again": ("\n    def _build_optimizer", "\n    def late(self):\n        self.model_param_group_index_map = {}\n\n    def _build_optimizer"),
            "restored with autograd": ("torch.no_grad()", "torch.enable_grad()"),
            "enumerate shadowed": ("\nclass Distributed", "\ndef enumerate(x):\n    return []\n\n\nclass Distributed"),
        },
    ),
    "hybrid model": Case(
        hybrid_linear_ce,
        hybrid_linear_ce.TARGET.module,
        lambda: {hybrid_linear_ce.TARGET.module: MODEL.format(name="HybridModel"), hybrid_linear_ce.LINEAR: LINEAR},
        MODEL_EDITS,
    ),
    "mamba model": Case(
        hybrid_linear_ce,
        "megatron.core.models.mamba.mamba_model",
        lambda: {"megatron.core.models.mamba.mamba_model": MODEL.format(name="MambaModel"), hybrid_linear_ce.LINEAR: LINEAR},
        MODEL_EDITS,
    ),
    "hopper": Case(
        hopper_flce_dispatch,
        hopper_flce_dispatch.TARGET.module,
        dispatching,
        {
            "class rebound": ("@lru_cache(maxsize=1)", "Platform = Older\n\n\n@lru_cache(maxsize=1)"),
            "branch raises": ("in (8, 9, 10, 12):\n", "in (8, 9, 10, 12):\n            raise ValueError(capability)\n"),
            "entry refuses": (_ENTRY, "def forward(", "@refused\ndef forward("),
            "getter rebound": ("class LinearCrossEntropy(", "_get_platform = older\n\n\nclass LinearCrossEntropy("),
            "no entry module": (_ENTRY, stand_in(FUSION / "linear_cross_entropy/blackwell/entry.py"), ""),
            "never dispatched": ("in (8, 9, 10, 12)", "not in (8, 9, 10, 12)"),
        },
    ),
    "mamba3 groups": Case(
        mamba3_mimo_gqa_backward,
        mamba3_mimo_gqa_backward.PLAIN.module,
        lambda: {mamba3_mimo_gqa_backward.PLAIN.module: MIMO, mamba3_mimo_gqa_backward.REDUCER: f"def {_GROUPED}(dq, dk, num_groups):\n    return sums(dq, dk, num_groups)\n"},
        {
            "refused by shape": ("    launch(", "    if q.shape[3] not in (1, q.shape[4]):\n        raise ValueError(q.shape)\n    launch("),
            "results overwritten": ("    return (dq,", "    dq[:] = dq_raw\n    return (dq,"),
            "reduced to one": (mamba3_mimo_gqa_backward.REDUCER, "sums(dq, dk, num_groups)", "sums(dq, dk, 1)"),
            "kernel of one group": ("i_h_qk = i_h // (H // G)", "i_h_qk = i_h"),
            "reducer from elsewhere": (f"from {mamba3_mimo_gqa_backward.REDUCER} import", "from vendor import"),
            "host rebound": ("    return (dq, dk, dv", "    return (dq, dk, dv, ddA, ddt, dtrap, dqb, dkb, dmimo_v)\n\n\nmamba_mimo_bwd_combined = older\n\n\ndef other():\n    return (dq, dk, dv"),
        },
        probe="probe_plain",
        learnt=lambda known: {mamba3_mimo_gqa_backward.PLAIN: known, mamba3_mimo_gqa_backward.VARLEN: known},
    ),
    "exemption": Case(
        float16_fp32_exemption,
        MAMBA3.rpartition(".")[0],
        lambda: {float16_fp32_exemption.TARGET.module: honouring(), MAMBA3.rpartition(".")[0]: marking()},
        {
            "marker does nothing": ("    parameter.keep_in_fp32 = True\n", ""),
            "marker from elsewhere": (MARKER, "from vendor import mark_keep_in_fp32\n"),
            "created again": ("        self.finish()\n", "        self.D = make()\n        self.finish()\n"),
            "unmarked later": ("        pass\n", "        del self.D.keep_in_fp32\n"),
            "constructor rebound": ("    def finish(self):", "    __init__ = older(__init__)\n\n    def finish(self):"),
            "honoured under a flag": (float16_fp32_exemption.TARGET.module, "    return module._apply(", "    if FLAG:\n        return module\n    return module._apply("),
        },
    ),
    "mixer": Case(
        float16_mixer_parameters,
        float16_mixer_parameters.MAMBA.target.module,
        lambda: {float16_mixer_parameters.MAMBA.target.module: mixer()},
        {
            "cleared after": ("        self.cp = MambaContextParallel(", "        for each in self.parameters():\n            each.keep_in_fp32 = False\n        self.cp = MambaContextParallel("),
            "cleared in another method": ("    def forward(\n", "    def late(self):\n        clear(self)\n\n    def forward(\n"),
            "marker shadowed": ("class MambaMixer(", "def mark_keep_in_fp32(parameter):\n    return parameter\n\n\nclass MambaMixer("),
            "class decorated": ("class MambaMixer(", "@cleared\nclass MambaMixer("),
            "marked under a flag": ("        mark_keep_in_fp32(self.A_log)\n", "        if FLAG:\n            mark_keep_in_fp32(self.A_log)\n"),
            "one left out": ("        mark_keep_in_fp32(self.D)\n", ""),
        },
        probe="probe_mamba",
        tree=lambda: _archive("megatron_core-0.19.2"),
    ),
    "fp8": Case(
        fp8_quantized_unwrap,
        fp8_quantized_unwrap.TARGET.module,
        lambda: {fp8_quantized_unwrap.TARGET.module: FP8},
        {
            "isinstance shadowed": ("def _all_bfloat16", "def isinstance(*_):\n    return False\n\ndef _all_bfloat16"),
            "isinstance imported": ("import torch\n", "import torch\nfrom vendor import isinstance\n"),
            "another class": ("import QuantizedTensor", "import Tensor as QuantizedTensor"),
            "decorated": ("def fused_sparse_mla_absorbed", "@unquantized\ndef fused_sparse_mla_absorbed"),
            "one of two": (" or isinstance(key, QuantizedTensor)", ""),
            "handed on": ("        return None\n    if not _all", "        query = query.quantized\n    if not _all"),
        },
    ),
    "branchless scatter": Case(
        dsa_branchless_scatter,
        _MASKING,
        _DSA_TEXTS,
        {
            "rebound through globals": ("\ndef scatter_topk", _REBOUND.format("scatter_topk_into_index_mask") + "\ndef scatter_topk"),
            "rebound by vars": ("\ndef scatter_topk", "\nvars()['scatter_topk_into_index_mask'] = older\n\ndef scatter_topk"),
            "reads": ("\ndef scatter_topk", "\ntorch = reading\n\ndef scatter_topk"),
            "decorated": ("\ndef scatter_topk", "\n@older\ndef scatter_topk"),
            "torch from elsewhere": ("\ndef scatter_topk", "\nimport vendor as torch\n\ndef scatter_topk"),
            "defined again": ("\ndef scatter_topk", "\ndef scatter_topk_into_index_mask(*args):\n    return older(*args)\n\ndef scatter_topk"),
        },
        probe="probe_masking",
    ),
    "bounds": Case(
        dsa_capture_gates,
        _MASKING,
        _DSA_TEXTS,
        {
            "rebound through globals": ("\ndef normalize_varlen", _REBOUND.format("build_fused_indexer_varlen_bounds") + "\ndef normalize_varlen"),
            "helper rebound": ("\ndef build_fused_indexer", "\nnormalize_varlen_bounds = reading\n\ndef build_fused_indexer"),
            "torch rebound": ("\ndef build_fused_indexer", "\ntorch = reading\n\ndef build_fused_indexer"),
            "decorated": ("\ndef build_fused_indexer", "\n@reading\ndef build_fused_indexer"),
        },
        probe="probe_masking",
    ),
    "positions": Case(
        dsa_capture_gates,
        dsa_capture_gates.LAYOUT_TARGET.module,
        _DSA_TEXTS,
        {
            "rebound through globals": ("\ndef get_packed_qk", _REBOUND.format("extract_query_positions_from_position_ids") + "\ndef get_packed_qk"),
            "compared on the GPU": ("not position_ids.is_cuda", "position_ids.is_cuda"),
        },
        probe="probe_layout",
    ),
    "index scores": Case(
        dsa_indexer_streaming,
        dsa_indexer_streaming.TARGET.module,
        lambda: {dsa_indexer_streaming.TARGET.module: "def _compute_index_scores(q, weights, k):\n    return streaming(q, weights, k)\n\n\ndef bwd_fused_indexer_loss_naive(q, weights, k):\n    return gradients(q, weights, k)\n"},
        {
            "multiplied": ("streaming(q, weights, k)", "(q[..., None] * k * weights).sum(-1)"),
            "rebound": ("\n\n\ndef bwd", "\n\n\nglobals().update(_compute_index_scores=older)\n\n\ndef bwd"),
            "in halves": ("gradients(q, weights, k)", "gradients(q.half(), weights, k)"),
            "decorated": ("def _compute_index_scores", "@older\ndef _compute_index_scores"),
            "swapped": ("streaming(q, weights, k)", "streaming(k, weights, q)"),
            "under a flag": ("    return streaming", "    if FLAG:\n        return dense(q, weights, k)\n    return streaming"),
        },
    ),
    "siso": Case(
        mamba3_siso_pipelining,
        _SISO,
        lambda: {_SISO: released("mamba_ssm-2.3.2.post1", _SISO).replace("@triton.autotune(", PRUNED, 1)},
        {
            "inverted": ("    if major in (10, 12):\n        return [config for config in configs if config.num_stages == 1]\n    return configs", "    if major in (10, 12):\n        return configs\n    return [config for config in configs if config.num_stages == 1]"),
            "wrong major": ('device)\n    if major', 'device)[::-1]\n    if major'),
            "one stage too many": ("num_stages == 1]", "num_stages == 1] + configs"),
            "under a flag": ("    if major in (10, 12):", "    if FLAG and major in (10, 12):"),
            "rebound": ("\n\n@triton.autotune(\n    prune", "\n\nkeep = all_of_them\n\n\n@triton.autotune(\n    prune"),
            "configurations added": ("@triton.jit\n", "@more_configurations\n@triton.jit\n"),
        },
    ),
    "cuda on import": Case(
        megatron_cuda_on_import,
        megatron_cuda_on_import.TARGET.module,
        lambda: {megatron_cuda_on_import.TARGET.module: "import torch\n\nA = torch.cuda.is_available()\n\n\ndef ask():\n    return torch.cuda.get_device_name(0)\n"},
        {
            "alias": ("A = ", "there = torch.cuda\nNAME = there.get_device_name(0)\nA = "),
            "in a method": ("A = ", "class Asks:\n    def name(self):\n        return torch.cuda.get_device_name(0)\n\n\nNAME = Asks().name()\nA = "),
            "in another module": ("import torch\n", "import torch\nfrom elsewhere import NAME\n"),
            "behind a decorator": ("def ask()", "@at_once\ndef ask()"),
            "tensor": ("A = ", "ONE = torch.ones(1, device='cuda')\nA = "),
            "in a comprehension": ("A = ", "NAMES = [torch.cuda.get_device_name(n) for n in range(1)]\nA = "),
        },
    ),
}  # fmt: skip
