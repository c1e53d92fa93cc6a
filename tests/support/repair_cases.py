"""Repairs in a few lines, for probes whose repair no release has, each with edits that leave or bring back the defect."""

from __future__ import annotations

import dataclasses
import functools
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from installed import tree_of
from places import WHEELS
from probing import ParsedOnce, Texts, as_if_read, ask, parsed_once, places_of
from trees import STAND_INS

from megacpp_overlays.feature_probes import (
    cp_local_loss_mean,
    cpu_offload_reload,
    dsa_branchless_scatter,
    dsa_capture_gates,
    dsa_indexer_streaming,
    dsa_sparse_attention,
    expert_bias_padding_mask,
    expert_rng_resume,
    explicit_tp_groups,
    float16_distributed_order,
    float16_fp32_exemption,
    float16_mixer_parameters,
    float16_optimizer_state_ids,
    fp8_quantized_unwrap,
    fsdp_optimizer_under_update,
    fully_reshardable_padding,
    gathered_logits_loss,
    gdn_capture_gates,
    global_aux_loss_scale,
    graph_hidden_recompute_grads,
    hopper_flce_dispatch,
    hybrid_linear_ce,
    hybrid_mtp_aux_loss,
    latent_moe_fc2_init,
    liger_flce_labelled,
    liger_flce_none_backward,
    loss_mask_cache,
    mamba2_int32_offsets,
    mamba3_mimo_gqa_backward,
    mamba3_mimo_reduce_layout,
    mamba3_siso_pipelining,
    mamba_packed_seq_idx,
    masked_aux_loss_tokens,
    megatron_cuda_on_import,
    mla_rope_head_blocks,
    mla_rope_key_gradient,
    mtp_roll_padded_boundaries,
    mtp_token_counts_local,
    mtp_z_loss,
    packed_params,
    pipeline_padding_mask,
    qk_clip_negative_head,
    quant_recipe_stale_weights,
    residual_norm_recompute_alias,
    scheduler_restore,
    seq_aux_loss_packed,
    sparse_mla_dimensions,
    tilelang_bulk_copy_rank,
    tilelang_grouped_reduce,
    tilelang_sums,
    tilelang_zero_extent_iterator,
    tp_attention_sinks,
    tp_label_smoothing,
    tp_norm_gradients,
    triton_register_operands,
)
from megacpp_overlays.feature_probes.repairs import Repairs
from megacpp_overlays.fp32_marks import MAMBA3, MAMBA3_ALWAYS, MAMBA3_MIMO
from megacpp_overlays.model import Finding, Target, Verdict
from megacpp_overlays.source.trees import SourceTree

Edit = tuple[str, str] | tuple[str, str, str] | Callable[[str], str]
"""Old and new text of the target, or of the module that is named first; or what is done to the text of the target.

A file that is no module is named `package:path`.
"""


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
    is_made_up: bool = True
    """Whether no release has it."""

    @property
    def overlay(self) -> str:
        """Return the id of the overlay that the probe is for."""
        return self.feature.__name__.rpartition(".")[2].replace("_", "-")

    def ask(self, texts: Mapping[str, str | None]) -> Finding:
        return ask(getattr(self.feature, self.probe), Texts(texts, self.tree()))

    def edited(self, edit: Edit) -> dict[str, str | None]:
        name, *changed = edit if isinstance(edit, tuple) and len(edit) == 3 else (self.target, *_parts(edit))
        before = self._text(name)
        if callable(changed[0]):
            after = changed[0](before)
        else:
            old, new = changed
            assert old in before
            after = before.replace(old, new, 1)
        assert after != before
        return {**self.texts(), name: after}

    def _text(self, name: str) -> str:
        tree = Texts(self.texts(), self.tree())
        package, _, path = name.partition(":")
        found = tree.shipped(package, path) if path else tree.module(name)
        assert found is not None
        return found.text

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


def _parts(edit: Edit) -> tuple[Any, ...]:
    return edit if isinstance(edit, tuple) else (edit,)


def appended(code: str) -> Callable[[str], str]:
    """Return an edit that adds code at the end."""
    return lambda text: f"{text}\n\n{code}\n"


SHARED_LOGITS = """        if logits.size(-1) == self.vocab_size:
            logits = tensor_parallel.scatter_to_tensor_model_parallel_region(logits, self.pg_collection.tp)
"""


def shared_logits() -> dict[str, str | None]:
    """Return a module that takes its share of gathered logits; made up, there is no pull request."""
    target = gathered_logits_loss.TARGET.module
    text = released("megatron_core-0.19.2", target)
    first = "        # [b s] => [s b]\n        labels = labels.transpose(0, 1).contiguous()\n"
    assert first in text
    return {target: text.replace(first, SHARED_LOGITS + first, 1)}


REFRESHED = "            self.optimizer.update_fp32_param_by_new_param()\n            return\n"
REFRESHES = (
    "        for param, fp32_param in self.param_to_fp32_param.items():\n            fp32_param.data.copy_(param)\n"
)
ALL_COPIES = (
    "        for param, inner_param in self.param_to_inner_param.items():\n            inner_param.data.copy_(param)\n"
)


def refreshed_copies() -> dict[str, str | None]:
    """Return modules in which all copies are refreshed once main weights are; made up, after pull request 5071."""
    target, copies = cpu_offload_reload.TARGET.module, cpu_offload_reload.COPIES
    text, hybrid = released("megatron_core-0.19.2", target), released("megatron_core-0.19.2", copies)
    assert text.count(REFRESHED) == hybrid.count(REFRESHES) == 1
    return {
        target: text.replace(REFRESHED, "            self._copy_shards()\n" + REFRESHED),
        copies: hybrid.replace(REFRESHES, ALL_COPIES),
    }


REPLICA = "            replica_id=dp_cp_rank,\n"
OWN = "            replica_id=0,\n"
SHAPE = "            (pp_size, tp_size),\n            (pp_rank, tp_rank),\n" + REPLICA
OF_RANKS = "            (pp_size, tp_size, dp_cp_size),\n            (pp_rank, tp_rank, dp_cp_rank),\n" + OWN


def states_of_ranks() -> dict[str, str | None]:
    """Return a module that saves the states of each rank; made up, after what pull request 6858 says of itself."""
    target = expert_rng_resume.TARGET.module
    text = released("megatron_core-0.19.2", target)
    assert text.count(SHAPE) == 1
    return {target: text.replace(SHAPE, OF_RANKS)}


CACHED = "                self.cached_loss_mask = loss_mask\n"
COPIED = "                self.cached_loss_mask = loss_mask.clone()\n"


def copied_mask() -> dict[str, str | None]:
    """Return a module that caches a copy of the loss mask, as pull request 6981 does."""
    target = loss_mask_cache.TARGET.module
    text = released("megatron_core-0.19.2", target)
    assert text.count(CACHED) == 1
    return {target: text.replace(CACHED, COPIED)}


DIVIDED_BY = {
    qk_clip_negative_head.GROUPED.module: "grouped_max_attn_logits",
    qk_clip_negative_head.LATENT.module: "self.core_attention.current_max_attn_logits",
}


def clamped_logits(target: str) -> dict[str, str | None]:
    """Return a module that divides the threshold by nothing less than itself, as pull request 7517 does."""
    text, divided = released("megatron_core-0.19.2", target), f"self.config.qk_clip_threshold / {DIVIDED_BY[target]}"
    assert text.count(divided) == 1
    return {target: text.replace(divided, f"{divided}.clamp(min=self.config.qk_clip_threshold)")}


ATTACHED_GLOBALLY = (
    "        probs = self.attach_and_log_load_balancing_loss(\n            probs,\n            global_aux_loss_coeff,\n"
)


def times_data_parallel_ranks() -> dict[str, str | None]:
    """Return a router that multiplies loss and coefficient by the number of data parallel ranks, as pull request 3769 does."""
    target = global_aux_loss_scale.TARGET.module
    text = released("megatron_core-0.19.2", target)
    assert text.count(ATTACHED_GLOBALLY) == 1
    ranks = "        dp_size = self.tp_dp_cp_group.size() // self.tp_cp_group.size()\n"
    scaled = ranks + "        global_aux_loss = global_aux_loss * dp_size\n        global_aux_loss_coeff *= dp_size\n"
    utils = released("megatron_core-0.19.2", global_aux_loss_scale.UTILS)
    return {target: text.replace(ATTACHED_GLOBALLY, scaled + ATTACHED_GLOBALLY), global_aux_loss_scale.UTILS: utils}


COUNTED = "        self.step(increment=num_steps)\n"
STARTS_DECAY = "        if 'start_wd' in state_dict:\n            self.start_wd ="


def set_counter() -> dict[str, str | None]:
    """Return a module that sets the counter, and sets rates at the end; made up, no pull request sets it."""
    target = scheduler_restore.TARGET.module
    text = released("megatron_core-0.19.2", target)
    assert text.count(COUNTED) == 1
    return {target: text.replace(COUNTED, "        self.num_steps = num_steps\n") + "        self.step(increment=0)\n"}


MARKED_SINKS = "            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)\n"
MARKED_ENGINE = """        if isinstance(getattr(self, "softmax_offset", None), torch.nn.Parameter):
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
"""


def marked_sinks() -> dict[str, str | None]:
    """Return modules that mark sinks where they are made, as a pull request has it."""
    core, engine = (
        released("megatron_core-0.19.2", name) for name in (tp_attention_sinks.CORE, tp_attention_sinks.ENGINE)
    )
    drawn = "                self.softmax_offset = config.init_method(self.softmax_offset)\n"
    start = engine.index("class TEDotProductAttention(")
    end = engine.index("    def forward(", start)
    assert drawn in core
    return {
        tp_attention_sinks.CORE: core.replace(drawn, drawn + MARKED_SINKS),
        tp_attention_sinks.ENGINE: engine[:end].rstrip() + "\n" + MARKED_ENGINE + "\n" + engine[end:],
    }


MARKED_OUTPUTS = "        for each in self.out_norm.parameters():\n            each.gradient_is_of_own_heads = True\n"
MARKED_HEADS = (
    "        for norm in (self.q_layernorm, self.k_layernorm):\n"
    "            for each in norm.parameters() if norm is not None else ():\n"
    "                each.gradient_is_of_own_heads = True\n"
)
OWN_HEADS = 'getattr(param, "gradient_is_of_own_heads", False)'


def marked_norms() -> dict[str, str | None]:
    """Let the newest release sum gradients of norms that their layers mark; made up, for nothing is proposed."""
    feature = tp_norm_gradients
    attention, net = "megatron.core.transformer.attention", f"{feature.NET}.common"
    named = '(\n                    config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)\n                )'
    kept = "        self.recompute_norm_out = False\n"
    finalizer, common, text = (
        released("megatron_core-0.19.2", each) for each in (feature.TARGET.module, net, attention)
    )
    end = text.index("    def run_realtime_tests(", text.index("class SelfAttention("))
    assert named in finalizer
    assert kept in common
    return {
        feature.TARGET.module: finalizer.replace(named, OWN_HEADS),
        net: common.replace(kept, MARKED_OUTPUTS + kept),
        attention: text[:end].rstrip() + "\n" + MARKED_HEADS + "\n" + text[end:],
    }


OF_THE_ATTENTION = "            tp_group=pg_collection.tp if pg_collection else None,\n"
OF_THE_MODEL = "                combined_embeddings, group=self.pg_collection.tp\n"


def told_projections() -> dict[str, str | None]:
    """Let a cross attention of the newest release hand its group on; made up, for nothing is proposed."""
    name = explicit_tp_groups.CROSS.target.module
    text = released("megatron_core-0.19.2", name)
    for each in ("q", "kv"):
        last = f'            name=(name + ".linear_{each}") if name is not None else None,\n'
        assert last in text
        text = text.replace(last, OF_THE_ATTENTION + last)
    return {name: text}


def told_embeddings() -> dict[str, str | None]:
    """Let LLaVA of the newest release hand its group on; made up, for nothing is proposed."""
    name = explicit_tp_groups.LLAVA.target.module
    text = released("megatron_core-0.19.2", name)
    call = "scatter_to_sequence_parallel_region(\n"
    alone = f"{call}                combined_embeddings\n"
    assert alone in text
    return {name: text.replace(alone, call + OF_THE_MODEL)}


@functools.cache
def released(prefix: str, module: str) -> str:
    source = archive(prefix).module(module)
    assert source is not None
    return source.text


@functools.cache
def archive(prefix: str) -> ParsedOnce:
    found = sorted(WHEELS.glob(f"{prefix}*"))
    if not found:
        pytest.skip(f"no {prefix} in {WHEELS}")
    return parsed_once(found[0])


def edited_release(module: str, old: str, new: str, *, release: str = "0.19.2") -> Texts:
    """Return a release of megatron-core in which the first place with a text of one module was changed."""
    tree = archive(f"megatron_core-{release}")
    source = tree.module(module)
    assert source is not None
    assert old in source.text
    return Texts({module: source.text.replace(old, new, 1)}, tree)


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
RESHARDABLE = """
from megatron.core.optimizer.layouts import padding_before


class DistributedOptimizer(MixedPrecisionOptimizer):
    def get_parameter_state_dp_zero(self, **how):
        return [gathered(buffer, **how) for buffer in self.buffers]

    def sharded_param_state_fully_reshardable(self, model, is_loading=False, metadata=None):
        found = []
        for state, buffer in zip(self.get_parameter_state_dp_zero(empty_data=is_loading), self.buffers):
            stripped = padding_before(buffer)
            for parameter, (start, end, bucket) in buffer.param_index_map.items():
                begin = start - stripped[bucket]
                finish = end - stripped[bucket]
                found.append({key: each[begin:finish].view(parameter.shape) for key, each in state.items()})
        return dict(enumerate(found))

    def load_parameter_state_from_fully_reshardable(self, state_dict):
        for number, parameter in enumerate(self.parameters()):
            self.set(parameter, {key: each.flatten() for key, each in state_dict[number].items()})
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


def deriving() -> str:
    """Let the mixer of the newest release do what main's other mixers do: derive what its caller did not give."""
    text = released("megatron_core-0.19.2", mamba_packed_seq_idx.TARGET.module)
    taken = "            seq_idx = packed_seq_params.seq_idx\n"
    made = "            seq_idx = build_packed_seq_idx(packed_seq_params, zxBCdt.shape[1])\n"
    imported = "from .packed_seq_helpers import build_packed_seq_idx\n"
    before = "from .mamba_context_parallel import MambaContextParallel\n"
    return text.replace(taken, made).replace(before, f"{before}{imported}")


def rolling() -> str:
    """Let the roll of the newest release ask for the padded boundaries by a function of its own."""
    text = released("megatron_core-0.19.2", mtp_roll_padded_boundaries.TARGET.module)
    taken = "    cu_seqlens = packed_seq_params.cu_seqlens_q\n"
    made = "    cu_seqlens = _boundaries(packed_seq_params, packed_seq_params.cu_seqlens_q_padded)\n"
    helper = "def _boundaries(params, padded):\n    return params.cu_seqlens_q if padded is None else padded\n"
    before = "def _roll_tensor_packed_seq("
    return text.replace(taken, made).replace(before, f"{helper}\n\n{before}", 1)


def summing() -> str:
    """Let the attention of the newest release sum the gradient of its rotary keys wherever they are not gathered."""
    text = released("megatron_core-0.19.2", mla_rope_key_gradient.TARGET.module)
    imported = "    gather_from_sequence_parallel_region,\n"
    text = text.replace(imported, f"    copy_to_tensor_model_parallel_region,\n{imported}", 1)
    before = "        if packed_seq_params is not None:\n            # If sequence packing, TE expect"
    made = (
        "        if _is_cut(self, kv_combined) or not self.config.sequence_parallel:\n"
        "            k_pos_emb = copy_to_tensor_model_parallel_region(k_pos_emb, group=self.tp_group)\n\n"
    )
    text = text.replace(before, made + before, 1)
    kept = "        if kv_combined.size(-1) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:\n"
    text = text.replace(kept, f"        is_cut = _is_cut(self, kv_combined)\n{kept}", 1)
    text = text.replace("if _is_cut(self, kv_combined) or not", "if is_cut or not", 1)
    helper = (
        "def _is_cut(attention, kv_combined):\n    config = attention.config\n"
        "    return kv_combined.size(-1) != config.kv_lora_rank + config.qk_pos_emb_head_dim\n\n\n"
    )
    return text.replace(
        "@dataclass\nclass MLASelfAttentionSubmodules", f"{helper}@dataclass\nclass MLASelfAttentionSubmodules", 1
    )


def selecting() -> str:
    """Return the text of a fused linear cross entropy that leaves out what has no label."""
    text = released("liger_kernel-0.8.5", liger_flce_labelled.TARGET.module)
    start = "    BT, H = _input.shape\n"
    assert text.count(start) == 1
    lines = "    labelled = (target != ignore_index).nonzero().flatten()\n    _input = _input[labelled]\n    target = target[labelled]\n"
    return text.replace(start, lines + start)


def smoothing() -> str:
    """Let the newest release count the classes of all ranks, and sum their log-probabilities."""
    text = released("megatron_core-0.19.2", tp_label_smoothing.TARGET.module)
    summed = [
        "mean_log_probs = log_probs.sum(dim=-1)",
        "torch.distributed.all_reduce(mean_log_probs, group=tp_group)",
        "mean_log_probs = mean_log_probs / vocab_size",
    ]
    mean = "            mean_log_probs = log_probs.mean(dim=-1)\n"
    text = text.replace(mean, "".join(f"            {line}\n" for line in summed))
    return text.replace("vocab_size = exp_logits.size(-1)\n", "vocab_size = exp_logits.size(-1) * world_size\n")


def counting() -> str:
    """Let the newest release sum the tokens of the main loss and of each further prediction over ranks."""
    text = released("megatron_core-0.19.2", mtp_token_counts_local.TARGET.module)
    start = "            num_tokens_safe = torch.clamp(num_tokens, min=1)\n"
    summed = [
        "counts = torch.stack([original_num_tokens, num_tokens]).float()",
        "group = parallel_state.get_data_parallel_group(with_context_parallel=True)",
        "torch.distributed.all_reduce(counts, group=group)",
        "num_tokens_safe = torch.clamp(counts[1], min=1)",
    ]
    text = text.replace(start, "".join(f"            {line}\n" for line in summed))
    return text.replace("(original_num_tokens / num_tokens_safe)", "(counts[0] / num_tokens_safe)")


def dividing() -> str:
    """Let the newest release divide by what all context parallel ranks count, and take back the mean that DDP makes."""
    text = released("megatron_core-0.19.2", cp_local_loss_mean.TARGET.module)
    divided = "                    output_tensor /= torch.clamp(num_tokens, min=1)\n"
    summed = [
        "counted = num_tokens.clone()",
        "torch.distributed.all_reduce(counted, group=parallel_state.get_context_parallel_group())",
        "output_tensor *= cp_group_size",
        "output_tensor /= torch.clamp(counted, min=1)",
    ]
    return text.replace(divided, "".join(f"{' ' * 20}{line}\n" for line in summed))


def widening(*modules: str) -> dict[str, str | None]:
    """Let all kernels of the newest release count their programs with 64 bits."""
    texts = {name: released("mamba_ssm-2.3.2.post1", name) for name in modules}
    return {name: re.sub(r"(tl\.program_id\((?:axis=)?\d\))", r"\1.to(tl.int64)", text) for name, text in texts.items()}


def ending() -> str:
    """Return the rotary kernels of 0.19.2 with masks that know their block, and one warp where they write in place."""
    text = released("megatron_core-0.19.2", mla_rope_head_blocks.MODULE)
    for name, stride in (("x", "stride_x"), ("kv", "stride_kv"), ("dkv", "stride_dkv")):
        mask = f"mask = {name}_off < head_num * {stride}_nheads"
        assert mask in text
        text = text.replace(mask, f"mask = {name}_off < (head_num - pid_head * BLOCK_H) * {stride}_nheads")
    inside = "mask = x_off < head_num * stride_dk_nheads"
    assert inside in text
    text = text.replace(inside, "mask = x_off < (head_num - i * BLOCK_H) * stride_dk_nheads")
    head, key, rest = text.partition('    key=["emb_dim", "k_dim"')
    return re.sub(r"triton.Config\((\{[^}]*\})\)", r"triton.Config(\1, num_warps=1)", head) + key + rest


def telling() -> str:
    """Let the stack of the newest release tell its MoE layers whether they predict."""
    text = released("megatron_core-0.19.2", hybrid_mtp_aux_loss.TARGET.module)
    head, made, rest = text.partition("                        submodules.moe_layer,\n")
    group = "                        pg_collection=pg_collection,\n"
    return head + made + rest.replace(group, f"{group}                        is_mtp_layer=is_mtp_layer,\n", 1)


def dividing_before() -> str:
    """Let the router of the newest release divide the z-loss before it attaches it."""
    text = released("megatron_core-0.19.2", mtp_z_loss.TARGET.module)
    head, made, rest = text.partition(
        "            z_loss = z_loss_func(logits, moe_z_loss_coeff, padding_mask=padding_mask)\n"
    )
    start = rest.index("            if (\n                self.is_mtp_layer")
    end = rest.index("            num_layers = self.config.num_layers\n", start)
    return head + made + rest[start:end] + rest[:start] + rest[end:]


def keeping_inputs() -> dict[str, str | None]:
    """Let the checkpoint of the newest release keep what is in the storage of an input, and its layers ask for that."""
    feature = residual_norm_recompute_alias
    text = released("megatron_core-0.19.2", feature.TARGET.module)
    for old, new in (
        (
            "    def __init__(self, fp8=False):\n",
            "    def __init__(self, fp8=False, retain_input_tensors=False):\n        self.retained = retain_input_tensors\n",
        ),
        (
            "        outputs = CheckpointWithoutOutputFunction.apply(run_function",
            "        self.inputs = {each.untyped_storage().data_ptr() for each in args if self.retained}\n        outputs = CheckpointWithoutOutputFunction.apply(run_function",
        ),
        (
            "            share_storage(output, recomputation_output)\n\n        self.ctx",
            "            if output.untyped_storage().data_ptr() not in self.inputs:\n                share_storage(output, recomputation_output)\n\n        self.ctx",
        ),
        (
            "            output.untyped_storage().resize_(0)\n",
            "            if output.untyped_storage().data_ptr() not in self.inputs:\n                output.untyped_storage().resize_(0)\n",
        ),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    made = "tensor_parallel.CheckpointWithoutOutput()"
    found: dict[str, str | None] = {feature.TARGET.module: text}
    for module in (feature.LAYER, feature.CALLABLES):
        layers = released("megatron_core-0.19.2", module)
        assert made in layers
        found[module] = layers.replace(made, f"{made[:-1]}retain_input_tensors=True)")
    return found  # fmt: skip


def found_in_warm_up() -> dict[str, str | None]:
    """Let graphs of the newest release look for parameters in what a warm-up without recompute returned."""
    feature = graph_hidden_recompute_grads
    text = released("megatron_core-0.19.2", feature.GRAPHS)
    for old, new in (
        (
            "            for _ in range(self.num_warmup_steps):\n",
            "            needs_recompute_param_discovery = self.grad_enabled\n            for _ in range(max(self.num_warmup_steps, needs_recompute_param_discovery)):\n",
        ),
        ("self.get_connected_params(fwd_graph_outputs)", "self.get_connected_params(warmup_outputs)"),
        (
            "                    param.main_grad.add_(wgrad)\n",
            "                    param.main_grad.add_(wgrad)\n                elif param.grad is not None:\n                    param.main_grad.add_(param.grad)\n",
        ),
    ):
        assert old in text, old
        text = text.replace(old, new, 1)
    return {feature.GRAPHS: text}  # fmt: skip


def counting_shares() -> str:
    """Let the router of the newest release take the tokens of a rank for its share of all; made up, a pull request counts before the sum."""
    text = released("megatron_core-0.19.2", masked_aux_loss_tokens.TARGET.module)
    for old, new in (
        (
            "    global_tokens_per_expert = reduce_from_tensor_model_parallel_region(\n        local_tokens_per_expert, reduce",
            "    local_num_tokens = routing_map.shape[0]\n"
            "    global_tokens_per_expert = reduce_from_tensor_model_parallel_region(\n        local_tokens_per_expert, reduce",
        ),
        (
            "        local_num_tokens = local_tokens_per_expert.sum() / topk\n        total_num_tokens = global_tokens_per_expert.sum() / topk\n",
            "        total_num_tokens = global_tokens_per_expert.sum() / topk\n        local_num_tokens = total_num_tokens / reduce_group.size()\n",
        ),
    ):
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def chosen(target: Target, is_latent: str) -> dict[str, str | None]:
    """Let a constructor of experts of the newest release choose how their second projection begins."""
    text = released("megatron_core-0.19.2", target.module)
    old = "init_method=not_none(self.config.output_layer_init_method)"
    assert text.count(old) == 1
    new = f"init_method=self.config.init_method if {is_latent} else self.config.output_layer_init_method"
    return {target.module: text.replace(old, new)}


def chosen_edits(is_latent: str, name: str) -> dict[str, Edit]:
    """Return edits of such a constructor that leave the second projection as it was."""
    choice = f"self.config.init_method if {is_latent} else self.config.output_layer_init_method"
    return {
        "the other way round": (
            choice,
            f"self.config.output_layer_init_method if {is_latent} else self.config.init_method",
        ),
        "for nobody": (
            choice,
            f"self.config.init_method if {is_latent} and FLAG else self.config.output_layer_init_method",
        ),
        "the same": (choice, "self.config.output_layer_init_method or self.config.init_method"),
        "forgotten before": (
            "        self.linear_fc2 = submodules.linear_fc2(\n",
            "        self.config = of_old(self.config)\n        self.linear_fc2 = submodules.linear_fc2(\n",
        ),
        "made of another": (
            "        self.linear_fc2 = submodules.linear_fc2(\n",
            "        submodules = of_old(submodules)\n        self.linear_fc2 = submodules.linear_fc2(\n",
        ),
        "decorated": (f"class {name}(", f"@of_old\nclass {name}("),
        "set from outside": appended(f"{name}.__init__ = of_old"),
    }


def uncounted() -> str:
    """Let Megatron-FSDP of the newest release build state with a step that changes nothing."""
    text = released("megatron_core-0.19.2", fsdp_optimizer_under_update.TARGET.module)
    head, step, rest = text.partition("    optimizer.step()\n    optimizer.zero_grad()\n")
    assert step
    return f"{head}{NOTHING_CHANGED}    optimizer.zero_grad()\n{rest}"


NOTHING_CHANGED = """    kept = [(group, group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group, _, _ in kept:
        group.update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    for group, rate, decay in kept:
        group.update(lr=rate, weight_decay=decay)
    for counted in (*optimizer.param_groups, *optimizer.state.values()):
        if "step" in counted:
            counted["step"] = counted["step"] * 0
"""


def owning() -> dict[str, str | None]:
    """Let layers of the newest release tell routers whose tokens a shard has, and routers sum by that."""
    layer, router = seq_aux_loss_packed.TARGET.module, seq_aux_loss_packed.ROUTER_TARGET.module
    texts = {name: released("megatron_core-0.19.2", name) for name in (layer, router)}
    count = "        mbs = hidden_states.shape[0] // tokens_per_sample\n"
    asked = """        if self.config.sequence_parallel and self.pg_collection.tp.size() > 1:
            group, rows = self.pg_collection.tp, hidden_states.shape[0]
            places = torch.arange(rows, device=hidden_states.device) + group.rank() * rows
            self.mlp.router.owners = places // tokens_per_sample
            self.mlp.router.samples = rows * group.size() // tokens_per_sample
            return hidden_states, padding_mask, None
"""
    shaped = "        routing_map = routing_map.reshape(seq_length, -1)\n"
    summed = """        if self.owners is not None:
            seq_length, bsz = 1, self.samples
            scores_for_aux_loss = torch.zeros(bsz, self.experts).index_add(0, self.owners, scores_for_aux_loss)
            routing_map = torch.zeros(bsz, self.experts).index_add(0, self.owners, routing_map.float())
            with_padding_mask = True
"""
    reshaped = "        scores_for_aux_loss = scores_for_aux_loss.reshape(seq_length, -1)\n" + shaped
    assert count in texts[layer]
    assert reshaped in texts[router]
    return {
        layer: texts[layer].replace(count, asked + count, 1),
        router: texts[router].replace(reshaped, summed + reshaped, 1),
    }


def masking_tokens() -> str:
    """Let the router of the newest release lay the mask of tokens over tokens."""
    text = released("megatron_core-0.19.2", expert_bias_padding_mask.TARGET.module)
    old = "routing_map = routing_map & (~padding_mask)\n"
    assert old in text
    return text.replace(old, "routing_map = routing_map & (~padding_mask).unsqueeze(-1)\n", 1)


def cutting() -> str:
    """Let the model of the newest release cut padding masks on every stage, in its own group."""
    text = released("megatron_core-0.19.2", pipeline_padding_mask.TARGET.module)
    start = text.index("            if padding_mask is not None and self.config.sequence_parallel:\n")
    end = text.index("        else:\n            # intermediate stage of pipeline\n", start)
    behind = text.index("        # Rotary positional embeddings (embedding is None", end)
    cut = """        if padding_mask is not None and self.config.sequence_parallel:
            turned = padding_mask.transpose(0, 1).contiguous()
            turned = tensor_parallel.scatter_to_sequence_parallel_region(turned, group=self.pg_collection.tp)
            padding_mask = turned.transpose(0, 1).contiguous()

"""
    return text[:start] + text[end:behind] + cut + text[behind:]


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


GDN_BASE = """
import torch


def fits(total, lengths, ranks):
    return torch.logical_and(total, (lengths % ranks == 0).sum() == lengths.numel())


def checked(cu_seqlens, length, ranks):
    total = cu_seqlens[-1] == length
    torch._assert_async(total)
    torch._assert_async(fits(total, cu_seqlens.diff(), ranks))


class _GDNBase(MegatronModule):
    def _resolve_cu_seqlens(self, cu_seqlens_padded, cu_seqlens_actual, total_seq_len, name, cp_size=1):
        cu_seqlens = cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded
        checked(cu_seqlens, total_seq_len, cp_size)
        return cu_seqlens
"""
GDN_FORWARD = """
from megatron.core.ssm.gated_delta_net.common import _GDNBase


class GatedDeltaNet(_GDNBase):
    def forward(self, hidden, packed):
        first = self._resolve_cu_seqlens(packed.padded, packed.q, hidden.size(0), "cu_seqlens_q")
        second = self._resolve_cu_seqlens(packed.padded, packed.kv, hidden.size(0), "cu_seqlens_kv")
        torch._assert_async((first == second).sum() == first.numel())
        return self.scan(hidden, first)
"""


def switched_on(lane: str, module: str = tilelang_bulk_copy_rank.TARGET.module) -> str:
    """Return kernels of Mamba-3 in a lane, with TMA lowering on."""
    source = tree_of(lane).module(module)
    assert source is not None
    return source.text.replace("TL_DISABLE_TMA_LOWER: True", "TL_DISABLE_TMA_LOWER: False")


_GDN = f"{gdn_capture_gates.SINGLE.module}.gdn"
_LIGER = liger_flce_none_backward.FUNCTION
COPY, OLD_COPY, UTILS = "src/cuda/op/copy.cc", "src/op/copy.cc", "src/layout/utils.cc"
REDUCE, OLD_REDUCE = "src/backend/common/op/reduce.h", "src/op/reduce.cc"
"""C++ that TileLang ships: since 0.1.11 and up to 0.1.9; since 0.1.10 and up to 0.1.9."""
_COVERED = "analyzer->CanProve(expected_lower_factor > mark->extent)"
_SCANNED = tuple(
    f"{mamba2_int32_offsets.SCAN.module[:-8]}{name}"
    for name in ("combined", "chunk_state", "chunk_scan", "bmm", "state_passing")
)
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
    "fully reshardable": Case(
        fully_reshardable_padding,
        fully_reshardable_padding.TARGET.module,
        lambda: {fully_reshardable_padding.TARGET.module: RESHARDABLE},
        {
            "bucket before": ("start - stripped[bucket]", "start - stripped[bucket - 1]"),
            "not what is cut": ("each[begin:finish]", "each[start:end]"),
            "half of it": ("finish = end - stripped[bucket]", "finish = end"),
            "nothing stripped": ("stripped = padding_before(buffer)", "stripped = [0] * len(buffer.buckets)"),
            "under a flag": ("                begin = start", "                if FLAG:\n                    stripped = [0] * 9\n                begin = start"),
            "gathered with padding": ("gathered(buffer, **how)", "gathered(buffer, padded=True, **how)"),
            "zeros at the end": (".view(parameter.shape)", ".new_zeros(parameter.shape)"),
            "loaded elsewhere": ("each.flatten()", "each.flatten().roll(1)"),
            "padding from elsewhere": ("from megatron.core.optimizer.layouts import", "from vendor import"),
            "rebound": ("\n    def load_parameter", "\n    sharded_param_state_fully_reshardable = older\n\n    def load_parameter"),
            "set outside": ("\n\nclass Distributed", "\n\ndef patch():\n    DistributedOptimizer.get_parameter_state_dp_zero = older\n\n\nclass Distributed"),
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
            "entry refuses": (_ENTRY, "    def forward(", "    @refused\n    def forward("),
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
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "packed rows": Case(
        mamba_packed_seq_idx,
        mamba_packed_seq_idx.TARGET.module,
        lambda: {
            mamba_packed_seq_idx.TARGET.module: deriving(),
            packed_params.MODULE: released("megatron_core-0.19.2", packed_params.MODULE),
        },
        {
            "discarded": ("        state_dtype_kwarg = (", "        seq_idx = None\n        state_dtype_kwarg = ("),
            "not handed on": ("            seq_idx=seq_idx,\n            **state_dtype_kwarg", "            seq_idx=None,\n            **state_dtype_kwarg"),
            "under a flag": ("            seq_idx = build", "            if FLAG:\n                return self.whole(zxBCdt)\n            seq_idx = build"),
            "not packed any more": ("self._ssm_training(zxBCdt, packed_seq_params)", "self._ssm_training(zxBCdt)"),
            "another length": ("zxBCdt.shape[1])", "0)"),
            "helper shadowed": ("class MambaMixer(", "def build_packed_seq_idx(*_):\n    return None\n\n\nclass MambaMixer("),
            "helper from elsewhere": ("from .packed_seq_helpers", "from vendor"),
            "scan shadowed": ("class MambaMixer(", "mamba_split_conv1d_scan_combined = without_documents\n\n\nclass MambaMixer("),
            "decorated": ("    def _ssm_training(", "    @whole\n    def _ssm_training("),
            "set from outside": ("def _check_mamba_sequence_packing_support(", "MambaMixer._ssm_training = older\n\n\ndef _check_mamba_sequence_packing_support("),
            "padding forgotten": (packed_params.MODULE, "cu_seqlens_q_padded: Tensor = None", "cu_seqlens_q_padded: Tensor = field(init=False)"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "packed labels": Case(
        mtp_roll_padded_boundaries,
        mtp_roll_padded_boundaries.TARGET.module,
        lambda: {mtp_roll_padded_boundaries.TARGET.module: rolling()},
        {
            "the other way round": ("cu_seqlens_q if padded is None", "cu_seqlens_q if padded is not None"),
            "never padded": ("    return params.cu_seqlens_q if padded is None else padded\n", "    return params.cu_seqlens_q\n"),
            "asked and not used": ("            start_idx = cu_seqlens[i]\n", "            start_idx = packed_seq_params.cu_seqlens_q[i]\n"),
            "only with one rank": ("    # CP enabled: each rank owns", "    cu_seqlens = packed_seq_params.cu_seqlens_q\n    # CP enabled: each rank owns"),
            "under a flag": ("    cu_seqlens = _boundaries(", "    cu_seqlens = packed_seq_params.cu_seqlens_q if FLAG else _boundaries("),
            "helper shadowed": ("class MTPLossLoggingHelper", "_boundaries = without_padding\n\n\nclass MTPLossLoggingHelper"),
            "helper decorated": ("def _boundaries(", "@unpadded\ndef _boundaries("),
            "handed on without": ("return _roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group)", "return _roll_tensor_packed_seq(tensor, shifts, dims, unpadded(packed_seq_params), cp_group)"),
            "not handed on": ("    if packed_seq_params is not None:\n        return _roll", "    if packed_seq_params is not None and FLAG:\n        return _roll"),
            "decorated": ("def _roll_tensor_packed_seq(", "@of_old\ndef _roll_tensor_packed_seq("),
            "set from outside": appended("roll_tensor = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "uncounted steps": Case(
        fsdp_optimizer_under_update,
        fsdp_optimizer_under_update.TARGET.module,
        lambda: {fsdp_optimizer_under_update.TARGET.module: uncounted()},
        {
            "with the rate": ("group.update(lr=0.0, weight_decay=0.0)", "group.update(weight_decay=0.0)"),
            "with decay": ("group.update(lr=0.0, weight_decay=0.0)", "group.update(lr=0.0)"),
            "for one group": ("    for group, _, _ in kept:\n", "    for group, _, _ in kept[:1]:\n"),
            "put back before": ("        group.update(lr=0.0, weight_decay=0.0)\n", "        group.update(lr=0.0, weight_decay=0.0)\n        group.update(lr=kept[0][1], weight_decay=kept[0][2])\n"),
            "counted in groups": ("(*optimizer.param_groups, *optimizer.state.values())", "optimizer.state.values()"),
            "counted for parameters": ("(*optimizer.param_groups, *optimizer.state.values())", "optimizer.param_groups"),
            "counted all the same": ('counted["step"] = counted["step"] * 0', 'counted["step"] = counted["step"] * 1'),
            "and once more": ("    optimizer.zero_grad()\n\n    # Define a new", "    optimizer.step()\n    optimizer.zero_grad()\n\n    # Define a new"),
            "with another gradient": ("param.grad = torch.zeros_like(param)", "param.grad = torch.ones_like(param)"),
            "gradients from elsewhere": ("import torch\n", "from vendor import torch\n"),
            "decorated": ("@experimental_api\ndef fully_shard_optimizer(", "@experimental_api\n@of_old\ndef fully_shard_optimizer("),
            "set from outside": appended("fully_shard_optimizer = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "inner projections of single experts": Case(
        latent_moe_fc2_init,
        latent_moe_fc2_init.SINGLE.module,
        lambda: chosen(latent_moe_fc2_init.SINGLE, "use_latent_size"),
        {
            **chosen_edits("use_latent_size", "MLP"),
            "never latent": ("use_latent_size = (self.config.moe_latent_size is not None) and is_expert", "use_latent_size = False"),
        },
        probe="probe_single",
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "inner projections of grouped experts": Case(
        latent_moe_fc2_init,
        latent_moe_fc2_init.GROUPED.module,
        lambda: chosen(latent_moe_fc2_init.GROUPED, "self.config.moe_latent_size"),
        chosen_edits("self.config.moe_latent_size", "TEGroupedMLP"),
        probe="probe_grouped",
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "shares of tokens": Case(
        masked_aux_loss_tokens,
        masked_aux_loss_tokens.TARGET.module,
        lambda: {masked_aux_loss_tokens.TARGET.module: counting_shares()},
        {
            "of all ranks": ("total_num_tokens / reduce_group.size()", "total_num_tokens"),
            "by other ranks": ("total_num_tokens / reduce_group.size()", "total_num_tokens / torch.distributed.get_world_size()"),
            "not kept": ("        local_num_tokens = total_num_tokens / reduce_group.size()\n", "        share = total_num_tokens / reduce_group.size()\n"),
            "counted again": ("        local_num_tokens = total_num_tokens / reduce_group.size()\n", "        local_num_tokens = global_tokens_per_expert.sum() / topk\n"),
            "from the sums": ("        local_num_tokens = total_num_tokens / reduce_group.size()\n", "        local_num_tokens = local_tokens_per_expert.sum() / topk\n"),
            "without a mask alone": ("    if with_padding_mask:\n", "    if not with_padding_mask:\n"),
            "multiplied twice": (masked_aux_loss_tokens.ROUTER, "aux_loss * num_local_tokens * self.tp_cp_group.size()", "aux_loss * num_local_tokens * self.tp_cp_group.size() ** 2"),
            "not given": (masked_aux_loss_tokens.ROUTER, "            valid_token_count=local_num_tokens,\n", "            valid_token_count=total_num_tokens,\n"),
            "decorated": ("def get_tokens_per_expert_and_token_count(", "@of_old\ndef get_tokens_per_expert_and_token_count("),
            "set from outside": appended("get_tokens_per_expert_and_token_count = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "found in a warm-up": Case(
        graph_hidden_recompute_grads,
        graph_hidden_recompute_grads.GRAPHS,
        found_in_warm_up,
        {
            "found in the capture": ("self.get_connected_params(warmup_outputs)", "self.get_connected_params(fwd_graph_outputs)"),
            "without a warm-up": ("needs_recompute_param_discovery = self.grad_enabled", "needs_recompute_param_discovery = 0"),
            "not added": ("                elif param.grad is not None:\n", "                elif param.grad is None:\n"),
            "a shorter walk": ("stack.extend(f for f, _ in fn.next_functions if f)", "stack.extend(f for f, _ in fn.next_functions[:1] if f)"),
            "no parameters": ("return tuple(p for p in self.base_module.parameters() if id(p) in p_ids)", "return tuple(p for p in self.base_module.parameters() if p in p_ids)"),
            "recomputed in warm-ups": (graph_hidden_recompute_grads.RANDOM, "        if is_graph_warmup():\n            return run_function(*args)\n", "        if not is_graph_warmup():\n            return run_function(*args)\n"),
            "gradients in the forward pass": (graph_hidden_recompute_grads.RANDOM, "        with torch.no_grad(), fwd_ctx:\n            outputs = run_function(*args)\n        ctx.save", "        with torch.enable_grad(), fwd_ctx:\n            outputs = run_function(*args)\n        ctx.save"),
            "set from outside": appended("_CudaGraphRunner.get_connected_params = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "kept inputs": Case(
        residual_norm_recompute_alias,
        residual_norm_recompute_alias.TARGET.module,
        keeping_inputs,
        {
            "never kept": ("self.retained = retain_input_tensors", "self.retained = False"),
            "outputs for inputs": ("for each in args if self.retained", "for each in args[:0] if self.retained"),
            "kept and restored": ("            if output.untyped_storage().data_ptr() not in self.inputs:\n                share_storage(", "            if True:\n                share_storage("),
            "the others kept": ("not in self.inputs:\n                output.untyped_storage().resize_", "in self.inputs:\n                output.untyped_storage().resize_"),
            "freed after all": ("        self.outputs = outputs\n", "        self.outputs = outputs\n        self.inputs = ()\n"),
            "layers that do not ask": (residual_norm_recompute_alias.LAYER, "retain_input_tensors=True", "retain_input_tensors=False"),
            "a schedule that does not ask": (residual_norm_recompute_alias.CALLABLES, "retain_input_tensors=True", "retain_input_tensors=False"),
            "decorated": ("class CheckpointWithoutOutput(object)", "@of_old\nclass CheckpointWithoutOutput(object)"),
            "set from outside": appended("CheckpointWithoutOutput.checkpoint = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "told of recipes": Case(
        quant_recipe_stale_weights,
        quant_recipe_stale_weights.TARGET.module,
        lambda: {quant_recipe_stale_weights.TARGET.module: released("megatron_core-0.19.2", quant_recipe_stale_weights.TARGET.module)},
        {
            "forgotten": ("            or getattr(self.config, 'quant_recipe', None) is not None\n", ""),
            "of another name": ("getattr(self.config, 'quant_recipe', None)", "getattr(self.config, 'recipe', None)"),
            "with both": ("            or getattr(self.config, 'quant_recipe', None) is not None\n", "            and getattr(self.config, 'quant_recipe', None) is not None\n"),
            "that it does not": ("                m.is_first_microbatch = True\n", "                m.is_first_microbatch = False\n"),
            "to the first": ("            for m in self.modules_with_is_first_microbatch:\n", "            for m in self.modules_with_is_first_microbatch[:1]:\n"),
            "to its own": ("                for m in self.modules():\n                    if hasattr(m, \"is_first_microbatch\"):\n", "                for m in self.children():\n                    if hasattr(m, \"is_first_microbatch\"):\n"),
            "decorated": ("    def set_is_first_microbatch(", "    @of_old\n    def set_is_first_microbatch("),
            "set from outside": appended("MegatronModule.set_is_first_microbatch = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
        is_made_up=False,
    ),
    "attention sinks": Case(
        tp_attention_sinks,
        tp_attention_sinks.CORE,
        marked_sinks,
        {
            "forgotten by a core": (MARKED_SINKS, "            pass\n"),
            "of a copy": ("set_tensor_model_parallel_attributes(self.softmax_offset,", "set_tensor_model_parallel_attributes(self.softmax_offset.clone(),"),
            "as no share": ("(self.softmax_offset, True, 0, 1)", "(self.softmax_offset, False, 0, 1)"),
            "where nothing is drawn": (MARKED_SINKS, f"            if not config.perform_initialization:\n    {MARKED_SINKS}"),
            "and made anew": (MARKED_SINKS, MARKED_SINKS + "            self.softmax_offset = torch.nn.Parameter(self.softmax_offset.detach())\n"),
            "of another module": ("from megatron.core import parallel_state, tensor_parallel\n", "from megatron.core import parallel_state\nfrom vendor import tensor_parallel\n"),
            "forgotten by Transformer Engine's": (tp_attention_sinks.ENGINE, MARKED_ENGINE, ""),
            "set from outside": appended("DotProductAttention.__init__ = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "marked norms": Case(
        tp_norm_gradients,
        tp_norm_gradients.TARGET.module,
        marked_norms,
        {
            "what is not marked": (OWN_HEADS, f"not {OWN_HEADS}"),
            "by another mark": (OWN_HEADS, 'getattr(param, "gradient_is_of_heads", False)'),
            "with sequence parallelism alone": (OWN_HEADS, f"(config.sequence_parallel and {OWN_HEADS})"),
            "averaged": ("ReduceOp.SUM, torch", "ReduceOp.AVG, torch"),
            "not called": ("    _allreduce_non_tensor_model_parallel_grads(model, config, tp_group)\n", "    other(model, config, tp_group)\n"),
            "forgotten by a net": (f"{tp_norm_gradients.NET}.common", MARKED_OUTPUTS, ""),
            "of none of a net": (f"{tp_norm_gradients.NET}.common", MARKED_OUTPUTS, MARKED_OUTPUTS.replace("True", "False")),
            "before a net makes another": (f"{tp_norm_gradients.NET}.common", MARKED_OUTPUTS, MARKED_OUTPUTS + "        self.out_norm = self.out_norm.clone()\n"),
            "forgotten by an attention": ("megatron.core.transformer.attention", MARKED_HEADS, ""),
            "of latent queries, too": (tp_norm_gradients.ATTENTION, "        self.kv_layernorm = ", "        self.q_layernorm.weight.gradient_is_of_own_heads = True\n        self.kv_layernorm = "),
            "decorated": ("def _allreduce_non_tensor_model_parallel_grads(", "@of_old\ndef _allreduce_non_tensor_model_parallel_grads("),
            "set from outside": appended("_allreduce_non_tensor_model_parallel_grads = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "groups of cross attention": Case(
        explicit_tp_groups,
        explicit_tp_groups.CROSS.target.module,
        told_projections,
        {
            "of experts": (OF_THE_ATTENTION, OF_THE_ATTENTION.replace(".tp ", ".expt_tp ")),
            "of another dimension": (OF_THE_ATTENTION, OF_THE_ATTENTION.replace(".tp ", ".cp ")),
            "the default one": (OF_THE_ATTENTION, "            tp_group=None,\n"),
            "set back": ("        self.linear_q = submodules.linear_q(\n", "        pg_collection = default_groups()\n        self.linear_q = submodules.linear_q(\n"),
            "built again": ("    def get_query_key_value_tensors(\n        self,\n        hidden_states: Tensor,\n        key_value_states: Optional[Tensor],\n        output_gate: bool = False,\n        split_qkv: bool = True,\n    ) -> Tuple[Tensor, Tensor, Tensor]:\n        \"\"\"\n        Derives `query` tensor from", "    def __init__(self, *given): built_again(self, *given)\n\n    def get_query_key_value_tensors(\n        self,\n        hidden_states: Tensor,\n        key_value_states: Optional[Tensor],\n        output_gate: bool = False,\n        split_qkv: bool = True,\n    ) -> Tuple[Tensor, Tensor, Tensor]:\n        \"\"\"\n        Derives `query` tensor from"),
            "decorated": ("class CrossAttention(Attention)", "@of_old\nclass CrossAttention(Attention)"),
            "set from outside": appended("CrossAttention.__init__ = of_old"),
        },
        probe="probe_cross",
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "groups of embeddings": Case(
        explicit_tp_groups,
        explicit_tp_groups.LLAVA.target.module,
        told_embeddings,
        {
            "of another dimension": (OF_THE_MODEL, OF_THE_MODEL.replace(".tp", ".cp")),
            "the default one": (OF_THE_MODEL, OF_THE_MODEL.replace("self.pg_collection.tp", "None")),
            "not on the first stage": ("        if self.sequence_parallel_lm and self.pre_process:\n            combined", "        if self.sequence_parallel_lm and not self.pre_process:\n            combined"),
            "cut once more": ("        return combined_embeddings, new_labels, new_loss_mask, packed_seq_params\n\n    def _apply", "        combined_embeddings = cut(combined_embeddings)\n        return combined_embeddings, new_labels, new_loss_mask, packed_seq_params\n\n    def _apply"),
            "by a helper that knows better": ("megatron.core.tensor_parallel.mappings", "    return _ScatterToSequenceParallelRegion.apply(input_, group)", "    return _ScatterToSequenceParallelRegion.apply(input_, default())"),
            "set from outside": appended("LLaVAModel._process_embedding_token_parallel = of_old"),
        },
        probe="probe_llava",
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "shares of gathered logits": Case(
        gathered_logits_loss,
        gathered_logits_loss.TARGET.module,
        shared_logits,
        {
            "where they are shares": ("if logits.size(-1) == self.vocab_size:", "if logits.size(-1) != self.vocab_size:"),
            "never": ("if logits.size(-1) == self.vocab_size:", "if False and logits.size(-1) == self.vocab_size:"),
            "discarded": ("            logits = tensor_parallel.scatter_to", "            tensor_parallel.scatter_to"),
            "of another group": ("region(logits, self.pg_collection.tp)", "region(logits, self.pg_collection.cp)"),
            "of another dimension": ("scatter_to_tensor_model_parallel_region(logits", "scatter_to_sequence_parallel_region(logits"),
            "of labels": ("            logits = tensor_parallel.scatter_to_tensor_model_parallel_region(logits,", "            labels = tensor_parallel.scatter_to_tensor_model_parallel_region(labels,"),
            "decorated": ("    def compute_language_model_loss(", "    @of_old\n    def compute_language_model_loss("),
            "set from outside": appended("LanguageModule.compute_language_model_loss = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "copies of an offloaded optimizer": Case(
        cpu_offload_reload,
        cpu_offload_reload.TARGET.module,
        refreshed_copies,
        {
            "of fp32 copies alone": (cpu_offload_reload.COPIES, ALL_COPIES, REFRESHES),
            "of nothing": (cpu_offload_reload.COPIES, ALL_COPIES, "        return\n"),
            "the other way round": (cpu_offload_reload.COPIES, "inner_param.data.copy_(param)", "param.data.copy_(inner_param)"),
            "after it returned": (REFRESHED, "            return\n" + REFRESHED),
            "decorated": ("    def _copy_model_params_to_main_params(", "    @of_old\n    def _copy_model_params_to_main_params("),
            "set from outside": appended("DistributedOptimizer._copy_model_params_to_main_params = of_old"),
        },
    ),
    "states of expert ranks": Case(
        expert_rng_resume,
        expert_rng_resume.TARGET.module,
        states_of_ranks,
        {
            "of one for all": (OF_RANKS, SHAPE.replace("dp_cp_rank", "dp_cp_rank or 0")),
            "under one name": ("(pp_rank, tp_rank, dp_cp_rank),\n", "(pp_rank, tp_rank, 0),\n"),
            "and read of the first": ("        dp_rank = (\n                        get_pg_rank(dp_group)", "        dp_rank = first(\n                        get_pg_rank(dp_group)"),
            "decorated": ("def get_rng_state(", "@of_old\ndef get_rng_state("),
            "read by a decorated function": ("def _load_base_checkpoint(", "@of_old\ndef _load_base_checkpoint("),
            "set from outside": appended("get_rng_state = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "cached loss mask": Case(
        loss_mask_cache,
        loss_mask_cache.TARGET.module,
        copied_mask,
        {
            "and the mask itself": (COPIED, COPIED + CACHED),
            "of one sample alone": (COPIED, "                self.cached_loss_mask = loss_mask.clone() if idx else loss_mask\n"),
            "masked before": (COPIED, "                loss_mask[labels == self._pad_token_id] = 0.0\n" + COPIED),
            "read without a copy": ("self.cached_loss_mask.clone()", "self.cached_loss_mask"),
            "of a mask that another holds": ("    loss_mask = torch.ones(seq_length", "    loss_mask = shared(seq_length"),
            "decorated": ("    def __getitem__(self, idx: Optional[int])", "    @of_old\n    def __getitem__(self, idx: Optional[int])"),
            "set from outside": appended("GPTDataset.__getitem__ = of_old"),
        },
    ),
    **{
        f"clipped heads, {probe}": Case(
            qk_clip_negative_head,
            target,
            functools.partial(clamped_logits, target),
            {
                "at nothing": (".clamp(min=self.config.qk_clip_threshold)", ".clamp(min=-1e9)"),
                "at the other end": (".clamp(min=self.config.qk_clip_threshold)", ".clamp(max=self.config.qk_clip_threshold)"),
                "of other logits": ("        if torch.any(" + DIVIDED_BY[target], "        self._negate()\n        if torch.any(" + DIVIDED_BY[target]),
                "decorated": (lambda text: "    @of_old\n    def clip_qk(self):".join(text.rsplit("    def clip_qk(self):", 1)),),
                "set from outside": appended(f"{cls}.clip_qk = of_old"),
            },
            probe=probe,
        )
        for probe, target, cls in (
            ("probe", qk_clip_negative_head.GROUPED.module, "SelfAttention"),
            ("probe_latent", qk_clip_negative_head.LATENT.module, "MLASelfAttention"),
        )
    },
    "balancing over the global batch": Case(
        global_aux_loss_scale,
        global_aux_loss_scale.TARGET.module,
        times_data_parallel_ranks,
        {
            "by nothing": ("global_aux_loss = global_aux_loss * dp_size", "global_aux_loss = global_aux_loss * 1"),
            "divided instead": ("global_aux_loss = global_aux_loss * dp_size", "global_aux_loss = global_aux_loss / dp_size"),
            "by all ranks": ("self.tp_dp_cp_group.size() // self.tp_cp_group.size()", "self.tp_dp_cp_group.size()"),
            "of detached scores": ("probs=scores_for_aux_loss,\n            tokens_per_expert=averated", "probs=scores_for_aux_loss.detach(),\n            tokens_per_expert=averated"),
            "of a microbatch": ("reduce_group=self.tp_dp_cp_group", "reduce_group=self.tp_cp_group"),
            "divided where it is attached": ("            activation = MoEAuxLossAutoScaler.apply(activation, aux_loss)\n", "            activation = MoEAuxLossAutoScaler.apply(activation, aux_loss / self.tp_dp_cp_group.size())\n"),
            "decorated": ("    def _apply_global_aux_loss(", "    @of_old\n    def _apply_global_aux_loss("),
            "set from outside": appended("TopKRouter._apply_global_aux_loss = of_old"),
        },
    ),
    "counter of a restored schedule": Case(
        scheduler_restore,
        scheduler_restore.TARGET.module,
        set_counter,
        {
            "the sum": ("        self.num_steps = num_steps\n", "        self.num_steps = self.num_steps + num_steps\n"),
            "added to": ("        self.num_steps = num_steps\n", "        self.num_steps += num_steps\n"),
            "of a fresh one alone": ("        self.num_steps = num_steps\n", "        self.num_steps = self.num_steps or num_steps\n"),
            "never": ("        self.num_steps = num_steps\n", "        if False:\n            self.num_steps = num_steps\n"),
            "and stepped by it": ("        self.step(increment=0)\n", "        self.step(increment=num_steps)\n"),
            "rates before weight decay": (STARTS_DECAY, "        self.step(increment=0)\n        return\n" + STARTS_DECAY),
            "rates not set": ("        self.step(increment=0)\n", ""),
            "counted twice": ("        self.num_steps += increment\n", "        self.num_steps += 2 * increment or self.num_steps\n"),
            "decorated": ("    def load_state_dict(", "    @of_old\n    def load_state_dict("),
            "set from outside": appended("OptimizerParamScheduler.load_state_dict = of_old"),
        },
    ),
    "told layers": Case(
        hybrid_mtp_aux_loss,
        hybrid_mtp_aux_loss.TARGET.module,
        lambda: {hybrid_mtp_aux_loss.TARGET.module: telling()},
        {
            "told that they do not": ("submodules.moe_layer,\n                        config=self.config,\n                        layer_number=layer_number,\n                        pg_collection=pg_collection,\n                        is_mtp_layer=is_mtp_layer", "submodules.moe_layer,\n                        config=self.config,\n                        layer_number=layer_number,\n                        pg_collection=pg_collection,\n                        is_mtp_layer=False"),
            "forgotten before": ("        # Build layers from the pre-selected segment\n", "        is_mtp_layer = False\n"),
            "in another branch": ("                elif layer_type == LayerSymbols.MOE:\n", "                elif layer_type == LayerSymbols.MOE and FLAG:\n"),
            "made again": ("            self.layers.append(layer)\n", "            self.layers.append(of_old(layer))\n"),
            "dropped by the layer": ("megatron.core.transformer.transformer_layer", "            is_mtp_layer=self.is_mtp_layer,\n", "            is_mtp_layer=False,\n"),
            "dropped by the experts": ("megatron.core.transformer.moe.moe_layer", "config=self.config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer\n", "config=self.config, pg_collection=pg_collection\n"),
            "dropped by the router": (hybrid_mtp_aux_loss.ROUTER, "        self.is_mtp_layer = is_mtp_layer\n", "        self.is_mtp_layer = False\n"),
            "not divided": (hybrid_mtp_aux_loss.ROUTER, "            aux_loss = aux_loss / self.config.mtp_num_layers\n", "            pass\n"),
            "decorated": ("class HybridStack(", "@of_old\nclass HybridStack("),
            "set from outside": appended("HybridStack.__init__ = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "divided z-loss": Case(
        mtp_z_loss,
        mtp_z_loss.TARGET.module,
        lambda: {mtp_z_loss.TARGET.module: dividing_before()},
        {
            "not divided": ("                z_loss = z_loss / self.config.mtp_num_layers\n", "                divided = z_loss / self.config.mtp_num_layers\n"),
            "for nobody": ("                z_loss = z_loss / self.config.mtp_num_layers\n", "                z_loss = z_loss / self.config.mtp_num_layers if FLAG else z_loss\n"),
            "and multiplied": ("z_loss = z_loss / self.config.mtp_num_layers", "z_loss = z_loss / self.config.mtp_num_layers * self.config.mtp_num_layers"),
            "by another number": ("z_loss = z_loss / self.config.mtp_num_layers", "z_loss = z_loss / min(1, self.config.mtp_num_layers)"),
            "another loss attached": ("logits = MoEAuxLossAutoScaler.apply(logits, z_loss)\n", "logits = MoEAuxLossAutoScaler.apply(logits, z_loss_func(logits, moe_z_loss_coeff, padding_mask=padding_mask))\n"),
            "with a coefficient for all": ("moe_z_loss_coeff = self.config.moe_z_loss_coeff / self", "moe_z_loss_coeff = self.config.mtp_num_layers * self.config.moe_z_loss_coeff / self"),
            "decorated": ("    def apply_z_loss(", "    @of_old\n    def apply_z_loss("),
            "set from outside": appended("TopKRouter.apply_z_loss = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "packed shards": Case(
        seq_aux_loss_packed,
        seq_aux_loss_packed.TARGET.module,
        owning,
        {
            "for one rank alone": ("self.pg_collection.tp.size() > 1:\n            group", "self.pg_collection.tp.size() == 1:\n            group"),
            "under a flag": ("        if self.config.sequence_parallel and self.pg", "        if FLAG and self.config.sequence_parallel and self.pg"),
            "places of the first rank": ("+ group.rank() * rows", "+ 0 * group.rank() * rows"),
            "samples of the rank": ("rows * group.size() // tokens_per_sample", "rows // tokens_per_sample"),
            "another length": ("self.mlp.router.owners = places // tokens_per_sample", "self.mlp.router.owners = places // hidden_states.shape[0]"),
            "told and unflattened": ("            return hidden_states, padding_mask, None\n        mbs", "        mbs"),
            "told to nobody": ("            self.mlp.router.owners =", "            self.mlp.owners ="),
            "never asked": ("        pre_mlp_layernorm_output, padding_mask, moe_unflatten_mbs = self._maybe_unflatten_for_moe(\n            pre_mlp_layernorm_output, padding_mask, packed_seq_params\n", "        pre_mlp_layernorm_output, padding_mask, moe_unflatten_mbs = self._maybe_unflatten_for_moe(\n            pre_mlp_layernorm_output, padding_mask, None\n"),
            "not listened to": (seq_aux_loss_packed.ROUTER_TARGET.module, "        if self.owners is not None:\n", "        if self.owners is None:\n"),
            "summed as one": (seq_aux_loss_packed.ROUTER_TARGET.module, "            seq_length, bsz = 1, self.samples\n", "            seq_length, bsz = self.samples, 1\n"),
            "another loss": (seq_aux_loss_packed.ROUTER_TARGET.module, "            probs = self._apply_seq_aux_loss(\n", "            probs = self._apply_aux_loss_of_old(\n"),
            "counted in rows": (seq_aux_loss_packed.UTILS, "    if with_padding_mask:\n", "    if with_padding_mask and FLAG:\n"),
            "decorated": ("    def _maybe_unflatten_for_moe(", "    @of_old\n    def _maybe_unflatten_for_moe("),
            "set from outside": appended("TransformerLayer._maybe_unflatten_for_moe = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "masked counts": Case(
        expert_bias_padding_mask,
        expert_bias_padding_mask.TARGET.module,
        lambda: {expert_bias_padding_mask.TARGET.module: masking_tokens()},
        {
            "over experts": ("(~padding_mask).unsqueeze(-1)", "(~padding_mask).unsqueeze(0)"),
            "padding alone": ("(~padding_mask).unsqueeze(-1)", "padding_mask.unsqueeze(-1)"),
            "not kept": ("                    routing_map = routing_map & (~padding_mask)", "                    masked = routing_map & (~padding_mask)"),
            "or": ("routing_map & (~padding_mask)", "routing_map | (~padding_mask)"),
            "under a flag": ("                if padding_mask is not None:\n                    routing_map = ", "                if padding_mask is not None and FLAG:\n                    routing_map = "),
            "counted before": ("                if padding_mask is not None:\n                    routing_map = ", "                self.local_tokens_per_expert += routing_map.sum(dim=0)\n                if padding_mask is not None:\n                    routing_map = "),
            "not told": ("self._apply_expert_bias(routing_map, padding_mask=padding_mask)", "self._apply_expert_bias(routing_map)"),
            "told in another order": ("            padding_mask = padding_mask.reshape(-1)\n", "            padding_mask = padding_mask.transpose(0, 1).reshape(-1)\n"),
            "decorated": ("    @jit_fuser\n    def _apply_expert_bias(", "    @of_old\n    def _apply_expert_bias("),
            "set from outside": appended("TopKRouter._apply_expert_bias = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
        is_made_up=False,
    ),
    "masks of stages": Case(
        pipeline_padding_mask,
        pipeline_padding_mask.TARGET.module,
        lambda: {pipeline_padding_mask.TARGET.module: cutting()},
        {
            "in the default group": ("(turned, group=self.pg_collection.tp)", "(turned)"),
            "in another group": ("(turned, group=self.pg_collection.tp)", "(turned, group=self.pg_collection.cp)"),
            "under a flag": ("        if padding_mask is not None and self.config.sequence_parallel:\n            turned", "        if padding_mask is not None and FLAG:\n            turned"),
            "on the first stage": ("        if padding_mask is not None and self.config.sequence_parallel:\n            turned", "        if padding_mask is not None and self.pre_process:\n            turned"),
            "along rows": ("            turned = padding_mask.transpose(0, 1).contiguous()\n", "            turned = padding_mask.contiguous()\n"),
            "not kept": ("            padding_mask = turned.transpose", "            cut = turned.transpose"),
            "whole again": ("            sequence_len_offset,\n            padding_mask,\n        )\n        if rotary", "            sequence_len_offset,\n            whole(padding_mask),\n        )\n        if rotary"),
            "forgotten by forward": ("            sequence_len_offset,\n            padding_mask,\n        ) = preproc_output[:6]", "            sequence_len_offset,\n            _,\n        ) = preproc_output[:6]"),
            "never given": ("            padding_mask=padding_mask,\n        )\n\n        (", "            padding_mask=None,\n        )\n\n        ("),
            "decorated": ("    def _preprocess(", "    @of_old\n    def _preprocess("),
            "set from outside": appended("GPTModel._preprocess = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "tokens of predictions": Case(
        mtp_token_counts_local,
        mtp_token_counts_local.TARGET.module,
        lambda: {mtp_token_counts_local.TARGET.module: counting()},
        {
            "own tokens of the main loss": ("(counts[0] / num_tokens_safe)", "(original_num_tokens / num_tokens_safe)"),
            "own tokens of the prediction": ("torch.clamp(counts[1], min=1)", "torch.clamp(num_tokens, min=1)"),
            "over context parallel ranks alone": ("all_reduce(counts, group=group)", "all_reduce(counts, group=cp_group)"),
            "over replicas alone": ("get_data_parallel_group(with_context_parallel=True)\n            torch.dist", "get_data_parallel_group()\n            torch.dist"),
            "the greatest": ("all_reduce(counts, group", "all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group"),
            "under a flag": ("            torch.distributed.all_reduce(counts", "            if FLAG:\n                torch.distributed.all_reduce(counts"),
            "of a copy": ("all_reduce(counts, group", "all_reduce(counts.clone(), group"),
            "and again on the rank": ("mtp_loss * (counts[0] / num_tokens_safe)", "mtp_loss * (counts[0] / num_tokens_safe / num_tokens)"),
            "never asked for": ("        if config.calculate_per_token_loss:\n            # When", "        if config.calculate_per_token_loss and FLAG:\n            # When"),
            "a prediction late": ("torch.stack([original_num_tokens, num_tokens])", "torch.stack([original_num_tokens, loss_mask.numel()])"),
            "the mask not rolled": ("        rolled_tensor.select(dims, shifts).fill_(0)\n        return rolled_tensor, rolled_tensor.sum()", "        return rolled_tensor, rolled_tensor.sum()"),
            "decorated": ("def process_mtp_loss(", "@of_old\ndef process_mtp_loss("),
            "set from outside": appended("process_mtp_loss = of_old"),
            "scaled on the way back": ("        return grad_output, scaled_mtp_loss_grad\n", "        return grad_output, scaled_mtp_loss_grad * own_share()\n"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "rotary keys": Case(
        mla_rope_key_gradient,
        mla_rope_key_gradient.TARGET.module,
        lambda: {
            mla_rope_key_gradient.TARGET.module: summing(),
            mla_rope_key_gradient.MAPPINGS: released("megatron_core-0.19.2", mla_rope_key_gradient.MAPPINGS),
        },
        {
            "not for columns": ("        if is_cut or not self.config.sequence_parallel:\n", "        if not self.config.sequence_parallel:\n"),
            "never cut": ("    return kv_combined.size(-1) != config", "    return kv_combined.size(-1) > config"),
            "asked too late": ("        is_cut = _is_cut(self, kv_combined)\n", "        is_cut = False\n"),
            "under a flag": ("        if is_cut or not", "        if FLAG and is_cut or not"),
            "another group": ("(k_pos_emb, group=self.tp_group)\n\n        if packed", "(k_pos_emb, group=self.pg_collection.cp)\n\n        if packed"),
            "copied and not used": ("            k_pos_emb = copy_to", "            copied = copy_to"),
            "detached behind": ("        kv_compressed = apply_module(self.kv_layernorm)(kv_compressed)\n", "        kv_compressed = apply_module(self.kv_layernorm)(kv_compressed)\n        k_pos_emb = k_pos_emb.detach() + older(k_pos_emb)\n"),
            "copy from elsewhere": ("    copy_to_tensor_model_parallel_region,\n", "    identity as copy_to_tensor_model_parallel_region,\n"),
            "helper shadowed": ("class FusedMLASelfAttention(", "_is_cut = never\n\n\nclass FusedMLASelfAttention("),
            "decorated": ("    def get_query_key_value_tensors(", "    @of_old\n    def get_query_key_value_tensors("),
            "set from outside": appended("MLASelfAttention.get_query_key_value_tensors = of_old"),
            "nothing is summed": (mla_rope_key_gradient.MAPPINGS, "return _reduce(grad_output, ctx.group), None", "return grad_output, None"),
            "summed by no rank": (mla_rope_key_gradient.MAPPINGS, "    torch.distributed.all_reduce(input_", "    torch.distributed.broadcast(input_"),
            "parts keep their own": (mla_rope_key_gradient.MAPPINGS, "    tensor_parallel_output_grad=True,\n    group=None,", "    tensor_parallel_output_grad=False,\n    group=None,"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "context losses": Case(
        cp_local_loss_mean,
        cp_local_loss_mean.TARGET.module,
        lambda: {cp_local_loss_mean.TARGET.module: dividing()},
        {
            "divided by the own count": ("output_tensor /= torch.clamp(counted", "output_tensor /= torch.clamp(num_tokens"),
            "summed over what is handed on": ("counted = num_tokens.clone()", "counted = num_tokens"),
            "a mean of a mean": ("                    output_tensor *= cp_group_size\n                    output_tensor /= torch", "                    output_tensor /= torch"),
            "in another group": ("group=parallel_state.get_context_parallel_group()", "group=parallel_state.get_data_parallel_group()"),
            "the greatest": ("all_reduce(counted, group", "all_reduce(counted, op=torch.distributed.ReduceOp.MAX, group"),
            "under a flag": ("                    torch.distributed.all_reduce(counted", "                    if FLAG:\n                        torch.distributed.all_reduce(counted"),
            "on the first microbatch": ("                    torch.distributed.all_reduce(counted", "                    if not forward_data_store:\n                        torch.distributed.all_reduce(counted"),
            "for losses per token": ("                if not config.calculate_per_token_loss:\n", "                if config.calculate_per_token_loss:\n"),
            "not told how many ranks": ("        cp_group_size,\n        is_last_stage,\n    )", "        1,\n        is_last_stage,\n    )"),
            "decorated": ("def forward_step_calc_loss(", "@of_old\ndef forward_step_calc_loss("),
            "another function called": ("output_tensor, num_tokens = forward_step_calc_loss(", "output_tensor, num_tokens = of_old("),
            "set from outside": appended("forward_step_calc_loss = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "smoothed labels": Case(
        tp_label_smoothing,
        tp_label_smoothing.TARGET.module,
        lambda: {tp_label_smoothing.TARGET.module: smoothing()},
        {
            "own classes counted": ("exp_logits.size(-1) * world_size", "exp_logits.size(-1)"),
            "own classes for the gradient": ("ctx.vocab_size = label_smoothing, vocab_size", "ctx.vocab_size = label_smoothing, exp_logits.size(-1)"),
            "own classes in the backward pass": ("label_smoothing, vocab_size = ctx.label_smoothing, ctx.vocab_size", "label_smoothing, vocab_size = ctx.label_smoothing, softmax.size(-1)"),
            "divided by the own classes": ("mean_log_probs = mean_log_probs / vocab_size", "mean_log_probs = mean_log_probs / exp_logits.size(-1)"),
            "summed and not used": ("loss - smoothing * mean_log_probs", "loss - smoothing * log_probs.mean(dim=-1)"),
            "in another group": ("all_reduce(mean_log_probs, group=tp_group)", "all_reduce(mean_log_probs)"),
            "the greatest": ("all_reduce(mean_log_probs, group", "all_reduce(mean_log_probs, op=torch.distributed.ReduceOp.MAX, group"),
            "under a flag": ("            torch.distributed.all_reduce(mean_log_probs", "            if FLAG:\n                torch.distributed.all_reduce(mean_log_probs"),
            "of what was normalised by the rank": ("            sum_exp_logits, op=torch", "            sum_exp_logits.clone(), op=torch"),
            "not normalised": ("        exp_logits.div_(sum_exp_logits.unsqueeze(dim=-1))\n", ""),
            "decorated": ("class _VocabParallelCrossEntropy(", "@of_old\nclass _VocabParallelCrossEntropy("),
            "another function applied": ("return _VocabParallelCrossEntropy.apply(", "return older.apply("),
            "set from outside": appended("_VocabParallelCrossEntropy.backward = of_old"),
            "ranges of another kind": ("megatron.core.tensor_parallel.utils", "index_f = rank * per_partition_vocab_size", "index_f = rank"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
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
    "chosen keys": Case(
        dsa_sparse_attention,
        dsa_sparse_attention.TARGET.module,
        lambda: {dsa_sparse_attention.TARGET.module: "from kernels import over_chosen\n\n\ndef _unfused_absorbed_dsa_fn(query, key, topk_indices, softmax_scale, v_channels, mask=None):\n    return over_chosen(query, key, topk_indices, softmax_scale, v_channels, mask)\n"},
        {
            "multiplied": ("    return over_chosen", "    scores = query @ key\n    return over_chosen"),
            "an einsum": ("    return over_chosen", "    scores = torch.einsum('sbhd,tbd->bhst', query, key)\n    return over_chosen"),
            "another kernel": ("from kernels import over_chosen", "from kernels import over_all as over_chosen"),
            "decorated": ("def _unfused", "@older\ndef _unfused"),
            "without the mask": ("v_channels, mask)", "v_channels, None)"),
            "under a flag": ("    return over_chosen", "    if FLAG:\n        return dense(query, key)\n    return over_chosen"),
            "rebound": appended("globals().update(_unfused_absorbed_dsa_fn=older)"),
            "defined again": appended("def _unfused_absorbed_dsa_fn(*args):\n    return older(*args)"),
        },
    ),
    "any dimensions": Case(
        sparse_mla_dimensions,
        sparse_mla_dimensions.TARGET.module,
        lambda: {sparse_mla_dimensions.TARGET.module: "from kernels import any_dimensions\n\n\ndef fused_sparse_mla_absorbed(query, key, topk_indices, softmax_scale, v_channels):\n    return any_dimensions(query, key, topk_indices, softmax_scale, v_channels)\n\n\ndef run_fused_absorbed_sparse_attention(query, key, topk_indices, softmax_scale, v_channels):\n    return fused_sparse_mla_absorbed(query, key, topk_indices, softmax_scale, v_channels)\n"},
        {
            "one kernel again": ("    return any_dimensions", "    if query.size(-1) != 576:\n        return None\n    return any_dimensions"),
            "blocks of indices": ("    return any_dimensions", "    if topk_indices.size(-1) % 64:\n        return None\n    return any_dimensions"),
            "another kernel": ("from kernels import any_dimensions", "from kernels import one_kernel as any_dimensions"),
            "decorated": ("def fused_sparse", "@declining\ndef fused_sparse"),
            "never asked": ("    return fused_sparse_mla_absorbed(", "    return None and fused_sparse_mla_absorbed("),
            "another dispatcher": ("    return fused_sparse_mla_absorbed(", "    return older("),
            "rebound": appended("globals().update(fused_sparse_mla_absorbed=older)"),
            "defined again": appended("def run_fused_absorbed_sparse_attention(*args):\n    return None"),
        },
    ),
    "blocks of heads": Case(
        mla_rope_head_blocks,
        mla_rope_head_blocks.MODULE,
        lambda: {mla_rope_head_blocks.MODULE: ending()},
        {
            "one mask as before": ("mask = kv_off < (head_num - pid_head * BLOCK_H)", "mask = kv_off < (head_num)"),
            "the sum as before": ("mask = x_off < (head_num - i * BLOCK_H)", "mask = x_off < (head_num)"),
            "one block further": ("mask = dkv_off < (head_num - pid_head * BLOCK_H)", "mask = dkv_off < (head_num - (pid_head - 1) * BLOCK_H)"),
            "another token's mask": ("mask = x_off < (head_num - pid_head * BLOCK_H)", "mask = x_off < (head_num - pid_m * BLOCK_H)"),
            "not in the mask of the store": ("    tl.store(Q + x_left_off, x_left, mask=mask)", "    tl.store(Q + x_left_off, x_left)"),
            "several warps in place": ('triton.Config({"BLOCK_H": 2}, num_warps=1)', 'triton.Config({"BLOCK_H": 2}, num_warps=4)'),
            "under a flag": ("    mask = kv_off < (head_num - pid_head * BLOCK_H)", "    mask = kv_off < (head_num - (pid_head if KNOWN else 0) * BLOCK_H)"),
            "another kernel launched": ("        rotary_bwd_q_kernel[grid](", "        of_old[grid]("),
            "decorated": ("class ApplyMLARotaryEmbQ(", "@of_old\nclass ApplyMLARotaryEmbQ("),
            "set from outside": appended("rotary_fwd_q_kernel = of_old"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "offsets of the scan": Case(
        mamba2_int32_offsets,
        mamba2_int32_offsets.SCAN.module,
        lambda: widening(*_SCANNED),
        {
            "one kernel narrow": (_SCANNED[2], "pid_bc = tl.program_id(axis=1).to(tl.int64)", "pid_bc = tl.program_id(axis=1)"),
            "one axis narrow": (_SCANNED[4], "pid_b = tl.program_id(axis=1).to(tl.int64)", "pid_b = tl.program_id(axis=1)"),
            "narrowed again": (_SCANNED[1], "    pid_c = pid_bc // batch\n", "    pid_c = (pid_bc // batch).to(tl.int32)\n"),
            "unsigned": (_SCANNED[3], "tl.program_id(axis=1).to(tl.int64)", "tl.program_id(axis=1).to(tl.uint32)"),
            "under a flag": ("pid_bc = tl.program_id(axis=1).to(tl.int64)", "pid_bc = tl.program_id(axis=1).to(tl.int64) if WIDE else tl.program_id(axis=1)"),
            "the product first": (_SCANNED[1], "pid_c * chunk_size * stride_dt_seqlen", "(pid_c * chunk_size * stride_dt_seqlen).to(tl.int32)"),
            "launched with others": ("        _chunk_scan_chunk_state_bwd_dx_kernel[grid_dx](", "        narrow_kernel[grid_dx]("),
            "another pass": appended("_mamba_chunk_scan_combined_fwd = of_old"),
            "a kernel from elsewhere": ("from mamba_ssm.ops.triton.ssd_bmm import _bmm_chunk_fwd, _bmm_chunk_bwd", "from vendor.ssd_bmm import _bmm_chunk_fwd, _bmm_chunk_bwd"),
        },
        probe="probe_scan",
    ),
    "offsets of the norm": Case(
        mamba2_int32_offsets,
        mamba2_int32_offsets.NORM.module,
        lambda: widening(mamba2_int32_offsets.NORM.module),
        {
            "rows narrow": ("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
            "blocks narrow": ("row_block_id = tl.program_id(0).to(tl.int64)", "row_block_id = tl.program_id(0)"),
            "the product narrow": ("X += row * stride_x_row + group * N", "X += (row * stride_x_row).to(tl.int32) + group * N"),
            "the start narrow": ("row_start = row_block_id * rows_per_program", "row_start = (row_block_id * rows_per_program).to(tl.int32)"),
            "under a flag": ("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)"),
            "another kernel": ("        _layer_norm_bwd_kernel[grid](x, weight", "        narrow_kernel[grid](x, weight"),
            "decorated": ("def _layer_norm_fwd(x, weight", "@of_old\ndef _layer_norm_fwd(x, weight"),
        },
        probe="probe_norm",
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
    "packed lengths": Case(
        gdn_capture_gates,
        gdn_capture_gates.COMMON.module,
        lambda: {gdn_capture_gates.COMMON.module: GDN_BASE, _GDN: GDN_FORWARD},
        {
            "read implicitly": ("    total = cu_seqlens[-1] == length", "    total = cu_seqlens[-1] == length\n    if not total:\n        raise ValueError(length)"),
            "read by name": ("torch._assert_async(total)", "assert total.item()"),
            "in the helper of the helper": ("return torch.logical_and(", "return bool("),
            "compared by the caller": (_GDN, "        return self.scan(", "        assert torch.equal(first, second)\n        return self.scan("),
            "read by the caller": (_GDN, "        return self.scan(", "        if first[-1] != second[-1]:\n            raise ValueError(first)\n        return self.scan("),
            "under a flag": ("        checked(cu_seqlens", "        if FLAG:\n            return older(cu_seqlens)\n        checked(cu_seqlens"),
            "method rebound": appended("_GDNBase._resolve_cu_seqlens = older"),
            "base from elsewhere": (_GDN, "from megatron.core.ssm", "from vendor.ssm"),
            "unpadded lengths": ("cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded", "cu_seqlens_actual"),
            "not checked": ("        checked(cu_seqlens, total_seq_len, cp_size)\n", ""),
        },
        probe="probe_common",
    ),
    "liger": Case(
        liger_flce_none_backward,
        liger_flce_none_backward.MODULE,
        lambda: {liger_flce_none_backward.MODULE: released("liger_kernel-0.8.5", liger_flce_none_backward.MODULE)},
        {
            "first token alone": ("* token_grad_output[start_idx:end_idx].unsqueeze(-1).to(", "* token_grad_output[0].to("),
            "product discarded": ("grad_logits_chunk = grad_logits_chunk * token_grad_output", "_ = grad_logits_chunk * token_grad_output"),
            "undone behind it": ("        if input_requires_grad:\n", "        grad_logits_chunk = _unscaled\n        if input_requires_grad:\n"),
            "never deferred": ('ctx.defer_grads = reduction == "none" and needs_grad', "ctx.defer_grads = False"),
            "deferred for another reduction": ('ctx.defer_grads = reduction == "none"', 'ctx.defer_grads = reduction == "mean"'),
            "under a flag": ("if token_grad_output is not None:", 'if __import__("os").environ.get("LIGER_REPAIRED") and token_grad_output is not None:'),
            "in dead code": ("if token_grad_output is not None:", "if False:"),
            "handed over in dead code": ("        if ctx.defer_grads:\n            # reduction", "        if False:\n            # reduction"),
            "scaled again": ("                **ctx.fwd_kwargs,\n            )\n", "                **ctx.fwd_kwargs,\n            )\n            grad_weight *= grad_output[0]\n"),
            "class rebound": appended(f"{_LIGER} = type('{_LIGER}', ({_LIGER},), older)"),
            "method rebound through globals": appended(f"globals()['{_LIGER}'].backward = older"),
            "class decorated": (f"class {_LIGER}(", f"@patched\nclass {_LIGER}("),
            "backward decorated": ("    @amp_custom_bwd\n", "    @amp_custom_bwd\n    @detached\n"),
            "isinstance shadowed": appended("def isinstance(*_):\n    return False"),
            "products imported from elsewhere": ("from liger_kernel.backends import dispatch", "from vendor import dispatch"),
            "a call at import": appended("patch_flce()"),
        },
        tree=lambda: archive("liger_kernel-0.8.5"),
        is_made_up=False,
    ),
    "labelled tokens": Case(
        liger_flce_labelled,
        liger_flce_labelled.TARGET.module,
        lambda: {liger_flce_labelled.TARGET.module: selecting()},
        {
            "all of them again": ("_input = _input[labelled]", "_input = _input[:]"),
            "other ones": ("target != ignore_index).nonzero()", "target == ignore_index).nonzero()"),
            "labels of others": ("target = target[labelled]", "target = target[: len(labelled)]"),
            "under a flag": ("    _input = _input[labelled]\n", "    if FLAG:\n        _input = _input[labelled]\n"),
            "and then all": ("    target = target[labelled]\n", "    target = target[labelled]\n    _input = whole\n"),
            "gradients of the part": ("    return loss, z_loss,", "    grad_input = grad_input[: len(labelled)]\n    return loss, z_loss,"),
            "decorated": ("def fused_linear_cross_entropy_forward(", "@of_old\ndef fused_linear_cross_entropy_forward("),
            "set from outside": appended("fused_linear_cross_entropy_forward = of_old"),
            "another kernel": (liger_flce_none_backward.KERNEL_MODULE, "    if y == ignore_index:\n", "    if y == ignore_index and FLAG:\n"),
        },
        tree=lambda: archive("liger_kernel-0.8.5"),
    ),
    "bulk copy": Case(
        tilelang_bulk_copy_rank,
        f"tilelang:{COPY}",
        lambda: {tilelang_bulk_copy_rank.TARGET.module: switched_on("edge")},
        {
            "two axes again": ("  const TMABulkCopyPlan &plan = bulk_analysis.plan.value();\n", '  ICHECK(shared_tensor->shape.size() == 2) << "Cannot detect TMA layout.";\n  const TMABulkCopyPlan &plan = bulk_analysis.plan.value();\n'),
            "no way back": ("    return fallback_to_normal(bulk_analysis.reason);\n", "    LOG(FATAL) << bulk_analysis.reason;\n"),
            "always refused": ("  if (!bulk_analysis.plan.has_value()) {\n    DLOG(WARNING) << \"TMA bulk copy", "  if (true) {\n    DLOG(WARNING) << \"TMA bulk copy"),
            "the other tensor": ("  shared_tensor = plan.shared_tensor;\n", ""),
            "not compiled": ("Stmt Copy::LowerBulk(const CopyNode &op, const LowerArgs &lower_args,\n", "#if 0\n#endif\nStmt Copy::LowerBulk(const CopyNode &op, const LowerArgs &lower_args,\n"),
            "defined away": ("Stmt Copy::LowerBulk(", "#define has_value() has_no_value()\nStmt Copy::LowerBulk("),
            "another plan": ("  TMADesc desc = plan.desc;\n", "  TMADesc desc = FlatDesc(plan.desc);\n"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
        is_made_up=False,
    ),
    "zero extent": Case(
        tilelang_zero_extent_iterator,
        f"tilelang:{UTILS}",
        dict,
        {
            "equality alone": (f"      analyzer->CanProveEqual(expected_lower_factor, mark->extent) ||\n      {_COVERED};", "      analyzer->CanProveEqual(expected_lower_factor, mark->extent);"),
            "in a comment": (_COVERED, f"false /* {_COVERED} */"),
            "and false": (_COVERED, f"({_COVERED} && false)"),
            "in a text": (_COVERED, f'Said("{_COVERED}")'),
            "under #if 0": (_COVERED, f"\n#if 0\n{_COVERED}\n#else\nfalse\n#endif\n"),
            "defined away": ("#include", "#define CanProve(x) false\n#include"),
            "asked and not used": ("  if (!covers_full_iter) {", "  if (true) {"),
            "the other way round": (_COVERED, f"!{_COVERED}"),
            "added by the caller": ("    results.insert(results.end(), complement_splits.rbegin(),", "    results.push_back(IterSplitExpr(mark, 1, 0, 1));\n    results.insert(results.end(), complement_splits.rbegin(),"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
        is_made_up=False,
    ),
    "grouped sums": Case(
        tilelang_grouped_reduce,
        f"tilelang:{REDUCE}",
        dict,
        {
            "never asked": ("  CheckThreadOwnedStepsProjectable(index_expr, reduce_var, thread_steps,\n                                   &proof_analyzer);\n", ""),
            "asked of nothing": ("  if (steps.empty()) {\n    return;", "  if (true) {\n    return;"),
            "a warning": ("  ICHECK(analyzer->CanProveEqual(projected_index, simplified_index))\n", "  if (!analyzer->CanProveEqual(projected_index, simplified_index))\n    LOG(WARNING)\n"),
            "compared with itself": ("CanProveEqual(projected_index, simplified_index)", "CanProveEqual(simplified_index, simplified_index)"),
            "not projected": ("        FloorMod(FloorDiv(reduce_var, lower), extent) * lower;", "        0;"),
            "counted twice": ("        remaining_thread_owned_factor /= factor;\n", ""),
            "under #if 0": ("  ICHECK(analyzer->CanProveEqual(projected_index", "#if 0\n#endif\n  ICHECK(analyzer->CanProveEqual(projected_index"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
        is_made_up=False,
    ),
    "register operands": Case(
        triton_register_operands,
        triton_register_operands.TARGET.module,
        dict,
        {
            "without waits": ("            print(ret)\n        return ret", "            print(ret)\n        return without_waits(ret)"),
            "an older compiler": ("from triton._C.libtriton import", "from triton._C.older.libtriton import"),
            "the older assembler": ("    return knobs.nvidia.ptxas_blackwell", "    return knobs.nvidia.ptxas"),
            "registers of the assembler": ("reg_alloc = ['--regAllocOptLevel=2']", "reg_alloc = []"),
            "pipelined again": ("            passes.ttgpuir.add_schedule_loops(pm)\n            passes.ttgpuir.add_pipeline(pm, opt.num_stages, dump_enabled)", "            passes.ttgpuir.add_schedule_loops(pm)\n            passes.ttgpuir.add_pipeline(pm, opt.num_stages, dump_enabled)\n            ours.passes.without_waits(pm)"),
            "assembled elsewhere": appended("CUDABackend.make_cubin = make_cubin_of_3_6"),
            "a method on top": ("class CUDABackend(BaseBackend):", "class CUDABackend(OlderBackend):"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
        is_made_up=False,
    ),
    "sums of a layout": Case(
        mamba3_mimo_reduce_layout,
        f"tilelang:{OLD_REDUCE}",
        dict,
        {
            "refused at the start": ("  auto src_scope = this->src.scope();\n", '  ICHECK(this->dim == 0) << "cannot lower";\n  auto src_scope = this->src.scope();\n'),
            "refused for some threads": ("        int reducing_threads = (*extent) * (*scale);\n", "        int reducing_threads = (*extent) * (*scale);\n        ICHECK(reducing_threads <= 32);\n"),
            "workspace left out": ("        if (reducing_threads > 32) {", "        if (false) {"),
            "not all threads": ("        if (*extent == 1)\n          continue;\n", "        continue;\n"),
            "of one thread": ("int reducing_threads = (*extent) * (*scale);", "int reducing_threads = *scale;"),
            "the words of the check": ("  auto src_scope = this->src.scope();\n", f'  LOG(FATAL) << "{tilelang_sums.CHECK}";\n  auto src_scope = this->src.scope();\n'),
            "another scope": ('src_scope == "local.fragment"', 'src_scope == "shared"'),
        },
        tree=lambda: parsed_once(tree_of("mamba3-pinned").root),
        is_made_up=False,
    ),
}  # fmt: skip
