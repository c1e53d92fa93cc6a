"""Repairs that differ from upstream's, for every overlay: edits as a vendor, a user or a later release may make against the defect.

No one has reviewed these repairs, so no verdict is FIXED. A seam must not go in on top of a repair either. For an edit where the
seam is right all the same, `said` has the verdict and the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from edited_code import Case, Edit, appended, archive
from installed import tree_of
from probing import ParsedOnce, parsed_once
from tilelang_files import OLD_COPY, OLD_REDUCE, REDUCE, UTILS, switched_on
from trees import STAND_INS

from megacpp_overlays.feature_probes import (
    compile_budget_dropout,
    cp_local_loss_mean,
    cpu_offload_reload,
    cudnn_sdpa_query_gradient,
    dcp_fresh_optimizer_state,
    dcp_frozen_optimizer_state,
    dsa_branchless_scatter,
    dsa_capture_gates,
    dsa_indexer_streaming,
    dsa_sparse_attention,
    expert_bias_padding_mask,
    expert_grad_norm,
    expert_gradient_groups,
    expert_rng_resume,
    explicit_tp_groups,
    float16_distributed_order,
    float16_fp32_exemption,
    float16_mixer_parameters,
    float16_optimizer_state_ids,
    fp8_quantized_unwrap,
    fsdp2_per_token_loss,
    fsdp_decoupled_grad_sums,
    fsdp_fused_accumulation,
    fsdp_lone_rank_gradients,
    fsdp_optimizer_under_update,
    fsdp_reduced_twice,
    fully_reshardable_padding,
    gathered_logits_loss,
    gdn_capture_gates,
    global_aux_loss_scale,
    graph_hidden_recompute_grads,
    hopper_flce_dispatch,
    hybrid_linear_ce,
    hybrid_mtp_aux_loss,
    latent_moe_fc2_init,
    layerwise_norm_groups,
    liger_flce_frozen_states,
    liger_flce_labelled,
    liger_flce_none_backward,
    liger_flce_strided_gradients,
    liger_glm4v_norms,
    loss_mask_cache,
    loss_parallel_log_softmax,
    mamba2_int32_offsets,
    mamba3_mimo_gqa_backward,
    mamba3_mimo_reduce_layout,
    mamba3_siso_pipelining,
    mamba_packed_seq_idx,
    masked_aux_loss_tokens,
    megatron_cuda_on_import,
    mix_order_reduction_views,
    mla_rope_head_blocks,
    mla_rope_key_gradient,
    mla_softmax_scale,
    mtp_roll_padded_boundaries,
    mtp_token_counts_local,
    mtp_z_loss,
    muon_gated_fc1,
    pipeline_padding_mask,
    precision_aware_reload,
    qk_clip_negative_head,
    quant_recipe_stale_weights,
    residual_norm_recompute_alias,
    scheduler_restore,
    seq_aux_loss_packed,
    sft_end_of_turn_loss,
    sparse_mla_dimensions,
    tilelang_bulk_copy_rank,
    tilelang_grouped_reduce,
    tilelang_zero_extent_iterator,
    tp_attention_sinks,
    tp_label_smoothing,
    tp_norm_gradients,
    trainer_moe_aux_loss,
    triton_register_operands,
)
from megacpp_overlays.model import Verdict

# Places of megatron-core that are broken as they are.
REFRESHED = "            self.optimizer.update_fp32_param_by_new_param()\n            return\n"
ATTACHED_GLOBALLY = (
    "        probs = self.attach_and_log_load_balancing_loss(\n            probs,\n            global_aux_loss_coeff,\n"
)
COUNTED = "        self.step(increment=num_steps)\n"


@dataclasses.dataclass(frozen=True)
class Otherwise(Case):
    """Something broken, and edits that repair it otherwise."""

    texts: Callable[[], Mapping[str, str | None]] = dict
    edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
    said: Mapping[str, tuple[Verdict, str]] = dataclasses.field(default_factory=dict)
    """The verdict on some edits, and why it is right; any other edit is UNRECOGNISED."""


def megatron() -> ParsedOnce:
    return archive("megatron_core-0.19.2")


def stand_in(name: str) -> Callable[[], ParsedOnce]:
    return lambda: parsed_once(STAND_INS[name])


def replaced_all(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


_LABELS_FIRST = "        labels = labels.transpose(0, 1).contiguous()\n"
_SINKS = "                self.softmax_offset = config.init_method(self.softmax_offset)\n"
_BRANCHES = """        if (picked < 0).any():
            real = picked >= 0
            if torch.any(real):
                batches, offsets, slots = torch.where(real)
                keys = picked[batches, offsets, slots]
                rows = first + offsets
                index_mask[batches, rows, keys] = 0.0
        else:
            index_mask[:, first:end].scatter_(-1, picked, 0.0)
"""
_EINSUM = "    index_scores = torch.einsum('sbhd,tbd->sbht', q.float(), k.float())\n"
_ALL_KEYS = "    attention_scores = torch.matmul(q.float(), k.float()) * softmax_scale\n"
_MASKING = dsa_sparse_attention.MASKING
_POSITION = "group_index, group_order = self.model_param_group_index_map[model_param]"
_INSTALLED = "*shard_fp32_params_this_group,\n                    *shard_fp32_from_float16_params_this_group,\n"
_GROUPS_OF_0_19 = "        self.model_param_group_index_map, self.opt_group_ranges = (\n"
_CAST = "self.add_module('module', module.bfloat16())"
_SUPER = "        super(Float16Module, self).__init__(config)\n"
_IDS = "chain.from_iterable(g for g in self.float16_groups)"
_CONVERTED = "        # Convert fp32_from_fp16_params\n"
_NO_KERNEL = "    if SparseMLA is None:\n        return None\n\n    if query.ndim"
_TOTAL = "        total_cu = cu_seqlens[-1].cpu().item()\n"
_REFUSAL = '            raise ValueError(f"Unsupported architecture: {capability[0]}")\n'
_REFUSED_G = '        raise ValueError(f"G value of {G} is not currently supported!")\n'
_CONFIGS = "        for s in [1, 2, 3]\n"
_FULL = "  bool match_full_iter =\n"
_TWO = 'ICHECK(shared_layout->InputDim() == 2) << "Cannot detect TMA layout.";'
_LENGTHS = "    expected_skv = sq * cp_size\n"
_UNEVEN = "        if not torch.all(all_lens == sq):\n"
_GDN = f"{gdn_capture_gates.SINGLE.module}.gdn"
_LANGUAGE = "megatron.core.models.common.language_module.language_module"
_MIMO = mamba3_mimo_reduce_layout.TARGET.module
_SIMD = "torch._inductor.codegen.simd"
_GRAD_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_IDEMPOTENT = "the seam marks the same parameters again, and casts nothing"

CASES = {
    "scatter": Otherwise(
        dsa_branchless_scatter,
        dsa_branchless_scatter.MASKING.module,
        edits={
            "a column for sentinels": (_BRANCHES, "        wide = torch.nn.functional.pad(index_mask[:, first:end], (0, 1))\n        wide.scatter_(-1, torch.where(picked < 0, index_mask.size(-1), picked), 0.0)\n        index_mask[:, first:end] = wide[..., :-1]\n"),
            "the greater of two": (_BRANCHES, "        kept = torch.where(picked < 0, float('-inf'), 0.0)\n        index_mask[:, first:end].scatter_reduce_(-1, picked.clamp(min=0), kept, 'amax')\n"),
            "compared with every key": (_BRANCHES, "        hit = (picked[..., None] == torch.arange(index_mask.size(-1), device=home)).any(dim=-2)\n        index_mask[:, first:end].masked_fill_(hit, 0.0)\n"),
            "another index of the row": (_BRANCHES, "        picked = torch.where(picked < 0, picked.amax(-1, keepdim=True), picked)\n        index_mask[:, first:end].scatter_(-1, picked, 0.0)\n"),
            "known to the caller": ("        if (picked < 0).any():\n", "        if HAS_SENTINELS:\n"),
            "only outside of a capture": ("        if (picked < 0).any():\n", "        if not torch.cuda.is_current_stream_capturing() and (picked < 0).any():\n"),
        },
        probe="probe_masking",
        tree=stand_in("dsa-june"),
    ),
    "lengths": Otherwise(
        dsa_capture_gates,
        dsa_capture_gates.DSA_TARGET.module,
        edits={
            "asserted on the device": (_UNEVEN, "        torch._assert_async((all_lens == sq).all())\n        if False:\n"),
            "only outside of a capture": (_LENGTHS, f"    if torch.cuda.is_current_stream_capturing():\n        return\n{_LENGTHS}"),
            "once for each shape": ("def _validate_nonpacked_cp_uniform_length(", "@functools.lru_cache\ndef _validate_nonpacked_cp_uniform_length("),
            "gathered as objects": ("        all_lens = torch.cat(all_lens)\n", "        all_lens = lengths_of_all_ranks(cp_group, sq)\n"),
        },
        probe="probe_dsa",
        tree=megatron,
    ),
    "masks": Otherwise(
        dsa_capture_gates,
        dsa_capture_gates.MASKING_TARGET.module,
        edits={
            "known to the builder": ("        if not torch.equal(everything, positions):\n            return None\n", ""),
            "declined": ("    if mask.ndim == 3:\n", "    if mask is not None:\n        return None\n    if mask.ndim == 3:\n"),
            "chosen on the device": ("    if not torch.equal(seen, everything < ends[:, None]):\n        return None\n", "    ends = torch.where((seen == (everything < ends[:, None])).all(-1), ends, 0)\n"),
        },
        probe="probe_masking",
        tree=stand_in("dsa-june"),
    ),
    "positions": Otherwise(
        dsa_capture_gates,
        dsa_capture_gates.LAYOUT_TARGET.module,
        edits={
            "asserted on the device": ("assert torch.equal(position_ids[0], position_ids[-1]), \"rows differ\"", "torch._assert_async((position_ids[0] == position_ids[-1]).all())"),
            "the first row": ("            assert torch.equal(position_ids[0], position_ids[-1]), \"rows differ\"\n", "            pass\n"),
            "where they are not on the GPU": ("position_ids.size(0) > 1:", "position_ids.size(0) > 1 and position_ids.device.type == 'cpu':"),
        },
        probe="probe_layout",
        tree=stand_in("dsa-june"),
    ),
    "fused loss of one file": Otherwise(
        dsa_capture_gates,
        dsa_capture_gates.DSA_TARGET.module,
        edits={
            "without a read": ("    if empty.any():\n        scores = scores.masked_fill(empty, 0.0)\n", "    scores = scores.masked_fill(empty, 0.0)\n"),
            "handled before": ("    if lighting_indexer is None:\n", "    if needs_repair():\n        return repaired(q)\n    if lighting_indexer is None:\n"),
            "kernels that decline": ("    if lighting_indexer is None:\n", "    if lighting_indexer is None or torch.cuda.is_current_stream_capturing():\n"),
        },
        probe="probe_dsa",
        tree=stand_in("dsa-spring"),
    ),
    "index scores": Otherwise(
        dsa_indexer_streaming,
        dsa_indexer_streaming.TARGET.module,
        edits={
            "head by head": (_EINSUM, f"    total = 0\n    for head in range(q.size(2)):\n        one = torch.einsum('sbd,tbd->sbt', q[:, :, head].float(), k.float())\n        total = total + (torch.relu(one) if use_relu else one) * weights[..., head, None]\n    return total.transpose(0, 1)\n{_EINSUM}"),
            "a fused kernel": (_EINSUM, f"    if fused_scores is not None:\n        return fused_scores(q, weights, k, use_relu)\n{_EINSUM}"),
            "a wrapper in chunks": appended("_compute_index_scores = in_chunks(_compute_index_scores)"),
            "gradients in chunks": ("    # Compute forward values needed for backward\n", "    return gradients_in_chunks(q, weights, k, grad_index_scores, use_relu)\n"),
            "gradients of another function": appended("def bwd_fused_indexer_loss_naive(*args, **options):\n    return backward_in_chunks(*args, **options)"),
            "in half precision": (_EINSUM, "    index_scores = torch.einsum('sbhd,tbd->sbht', q, k)\n"),
        },
        tree=megatron,
    ),
    "absorbed attention": Otherwise(
        dsa_sparse_attention,
        dsa_sparse_attention.TARGET.module,
        edits={
            "gathered keys": (_ALL_KEYS, f"    if GATHER:\n        return over_gathered(query, key, topk_indices, softmax_scale, v_channels)\n{_ALL_KEYS}"),
            "in blocks of queries": appended("_unfused_absorbed_dsa_fn = in_blocks(_unfused_absorbed_dsa_fn)"),
            "head by head": (_ALL_KEYS, "    attention_scores = torch.stack([torch.matmul(q[:, head].float(), k[:, 0].float()) for head in range(np)], dim=1) * softmax_scale\n"),
            "in half precision": (_ALL_KEYS, "    attention_scores = torch.matmul(q, k) * softmax_scale\n"),
            "recomputed": ("def _unfused_absorbed_dsa_fn(", "@recomputed\ndef _unfused_absorbed_dsa_fn("),
            "masks of another kind": (_MASKING, "        index_mask[:, s0:s1].scatter_reduce_(-1, safe_idx, src, reduce=\"amax\", include_self=True)\n", "        index_mask[:, s0:s1] = nearest(safe_idx, src)\n"),
        },
        tree=megatron,
    ),
    "one kernel": Otherwise(
        sparse_mla_dimensions,
        sparse_mla_dimensions.TARGET.module,
        edits={
            "padded channels": ("    if query.size(-1) != 576 or v_channels != 512:\n", "    query, key = padded(query), padded(key)\n    if query.size(-1) != 576:\n"),
            "another kernel first": ("    if query.size(-1) != 576 or v_channels != 512:\n", "    if query.size(-1) != 576 and OTHER is not None:\n        return OTHER.apply(query, key, topk_indices, softmax_scale, v_channels)\n    if query.size(-1) != 576 or v_channels != 512:\n"),
            "padded indices": ("    if topk_indices.size(-1) % 64 != 0:\n        return None\n", "    topk_indices = padded(topk_indices, 64)\n"),
            "handled by the caller": ("    return fused_sparse_mla_absorbed(query, key, topk_indices, softmax_scale, v_channels)\n", "    return fused_sparse_mla_absorbed(query, key, topk_indices, softmax_scale, v_channels) or of_any_size(query, key, topk_indices, softmax_scale, v_channels)\n"),
            "wrapped": appended("fused_sparse_mla_absorbed = of_any_size(fused_sparse_mla_absorbed)"),
            "any heads": ("    if kv_group <= 0 or heads % kv_group != 0:\n        return False\n", "    if heads % 16 == 0:\n        return True\n"),
        },
        tree=megatron,
    ),
    "order": Otherwise(
        float16_distributed_order,
        float16_distributed_order.TARGET.module,
        edits={
            "groups in the order of the buffer": (_INSTALLED, "*as_in_the_buffer(group_range, shard_fp32_params_this_group, shard_fp32_from_float16_params_this_group)\n"),
            "positions by dtype": ('for param in gbuf_range_map["param_map"]:', 'for param in sorted(gbuf_range_map["param_map"], key=lambda each: each.dtype is not torch.float32):'),
            "positions are looked up": replaced_all(_POSITION, "group_index, group_order = self._position_of(model_param)"),
            "groups of one dtype": (_GROUPS_OF_0_19, f"        split_groups_by_dtype(self.optimizer)\n{_GROUPS_OF_0_19}"),
            "recorded by the optimizer": (_GROUPS_OF_0_19, f"        self.recorded = positions_of(self.optimizer)\n{_GROUPS_OF_0_19}"),
            "a subclass of its own": appended("class InOrder(DistributedOptimizer):\n    pass\n\n\nDistributedOptimizer = InOrder"),
        },
        tree=megatron,
    ),
    "cast": Otherwise(
        float16_fp32_exemption,
        float16_fp32_exemption.TARGET.module,
        edits={
            "cast by name": (_CAST, "self.add_module('module', cast_but_declared(module, torch.bfloat16))"),
            "put back": (_CAST, f"kept = fp32_parameters(module)\n            {_CAST}\n            put_back(module, kept)"),
            "protected before": (_SUPER, f"{_SUPER}        module.protect_fp32_parameters()\n"),
            "module by module": (_CAST, "self.add_module('module', module.apply(lambda each: each.cast_to(torch.bfloat16)))"),
            "an option of the config": (_CAST, "self.add_module('module', module if config.keep_fp32 else module.bfloat16())"),
            "a method of its own": ("    def set_input_tensor(self, input_tensor):", "    def bfloat16(self):\n        return cast_but_declared(self)\n\n    def set_input_tensor(self, input_tensor):"),
        },
        tree=megatron,
    ),
    "mixer": Otherwise(
        float16_mixer_parameters,
        float16_mixer_parameters.MAMBA.module,
        edits={
            "a class of parameters": ("self.A_log = nn.Parameter(A_log)", "self.A_log = Fp32Parameter(A_log)"),
            "no parameter": ("        self.D = nn.Parameter(\n", "        self.D = KeptInFp32(\n"),
            "built elsewhere": ("        self.d_model = d_model\n", "        self.d_model = d_model\n        if config.fp32_mixers:\n            return build_in_fp32(self)\n"),
            "put back when it is read": ("-torch.exp(self.A_log.float())", "-torch.exp(restored(self.A_log).float())"),
            "a cast of its own": ("    def forward(\n", "    def _apply(self, function):\n        return super()._apply(lambda each: each if each.dtype is torch.float32 else function(each))\n\n    def forward(\n"),
            "marked by a helper": ("        self.tp_group = pg_collection.tp\n", "        self.tp_group = pg_collection.tp\n        keep_what_is_fp32(self)\n"),
        },
        said={
            "a cast of its own": (Verdict.BROKEN, f"{_IDEMPOTENT}; where a module has a cast of its own, `float16-fp32-exemption` lets that run"),
        },
        probe="probe_mamba",
        tree=megatron,
    ),
    "packed rows": Otherwise(
        mamba_packed_seq_idx,
        mamba_packed_seq_idx.TARGET.module,
        edits={
            "in the method": ("seq_idx = packed_seq_params.seq_idx", "seq_idx = build_packed_seq_idx(packed_seq_params, zxBCdt.shape[1])"),
            "in the scan's argument": ("            seq_idx=seq_idx,\n            **state_dtype_kwarg", "            seq_idx=documents(seq_idx, packed_seq_params),\n            **state_dtype_kwarg"),
            "before the method": ("            y = self._ssm_training(zxBCdt, packed_seq_params)", "            packed_seq_params = with_documents(packed_seq_params, zxBCdt)\n            y = self._ssm_training(zxBCdt, packed_seq_params)"),
            "row by row": ("            y = self._ssm_training(zxBCdt, packed_seq_params)", "            y = torch.cat([self._ssm_training(each) for each in documents(zxBCdt, packed_seq_params)])"),
            "refused": ("            seq_idx = packed_seq_params.seq_idx", "            seq_idx = packed_seq_params.seq_idx\n            assert seq_idx is not None, 'total_tokens must be given'"),
            "in the constructor": ("megatron.core.packed_seq_params", "and self.total_tokens is not None:", "and self.given():"),
            "as a property": ("megatron.core.packed_seq_params", "    seq_idx: Tensor = None\n", "    seq_idx: Tensor = derived()\n"),
            "tokens by default": ("megatron.core.packed_seq_params", "    total_tokens: int = None\n", "    total_tokens: int = counted()\n"),
            "a base that packs": ("class MambaMixer(MegatronModule)", "class MambaMixer(PackedRows, MegatronModule)"),
            "known to the mixer": ("    def forward(\n", "    def documents(self):\n        return 1\n\n    def forward(\n"),
        },
        said={"known to the mixer": (Verdict.BROKEN, "a method more changes nothing, and the seam leaves a seq_idx that is there as it is")},
        tree=megatron,
    ),
    "packed labels": Otherwise(
        mtp_roll_padded_boundaries,
        mtp_roll_padded_boundaries.TARGET.module,
        edits={
            "in the method": ("    cu_seqlens = packed_seq_params.cu_seqlens_q\n", "    cu_seqlens = packed_seq_params.cu_seqlens_q_padded\n    if cu_seqlens is None:\n        cu_seqlens = packed_seq_params.cu_seqlens_q\n"),
            "by a helper": ("    cu_seqlens = packed_seq_params.cu_seqlens_q\n", "    cu_seqlens = physical_boundaries(packed_seq_params)\n"),
            "by the function that hands on": ("        return _roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group)", "        return _roll_tensor_packed_seq(tensor, shifts, dims, physical(packed_seq_params), cp_group)"),
            "without the padding": ("        return _roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group)", "        return padded_again(_roll_tensor_packed_seq(unpadded(tensor), shifts, dims, packed_seq_params, cp_group))"),
            "refused": ("    cu_seqlens = packed_seq_params.cu_seqlens_q\n", "    cu_seqlens = packed_seq_params.cu_seqlens_q\n    assert int(cu_seqlens[-1]) == tensor.size(-1), 'padded rows are not rolled'\n"),
            "at every end": ("            rolled_seq[..., shifts:] = 0\n", "            rolled_seq[..., shifts:] = 0\n            rolled_seq[..., ends_within(packed_seq_params, i)] = 0\n"),
            "from the outside": appended("_roll_tensor_packed_seq = by_document(_roll_tensor_packed_seq)"),
            "no packed rows any more": ("    if packed_seq_params is not None:\n        return _roll", "    if packed_seq_params is not None:\n        tensor = by_document(tensor, packed_seq_params)\n        packed_seq_params = None\n    if packed_seq_params is not None:\n        return _roll"),
            "as a property": ("megatron.core.packed_seq_params", "    cu_seqlens_q: Tensor = None\n", "    cu_seqlens_q: Tensor = physical()\n"),
            "the constructor takes the padded ones": ("megatron.core.packed_seq_params", "    def __post_init__(self):\n", "    def __post_init__(self):\n        if self.cu_seqlens_q_padded is not None:\n            self.cu_seqlens_q = self.cu_seqlens_q_padded\n"),
            "the caller converts": ("    original_num_tokens = loss_mask.sum()\n", "    original_num_tokens = loss_mask.sum()\n    packed_seq_params = physical(packed_seq_params)\n"),
        },
        said={
            "the caller converts": (Verdict.BROKEN, "whatever says where documents lie, the seam takes nothing else"),
        },
        tree=megatron,
    ),
    "uncounted steps": Otherwise(
        fsdp_optimizer_under_update,
        fsdp_optimizer_under_update.TARGET.module,
        edits={
            "no step": ("    optimizer.step()\n    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n"),
            "of a copy": ("    optimizer.step()\n    optimizer.zero_grad()\n", "    optimizer.load_state_dict(stepped(copy.deepcopy(optimizer)))\n    optimizer.zero_grad()\n"),
            "for a checkpoint alone": ("    optimizer.step()\n    optimizer.zero_grad()\n", "    if LOADS_A_CHECKPOINT:\n        optimizer.step()\n    optimizer.zero_grad()\n"),
            "by a hook": ("    optimizer.step()\n    optimizer.zero_grad()\n", "    with optimizer.register_step_post_hook(uncounted):\n        optimizer.step()\n    optimizer.zero_grad()\n"),
            "by a context": ("    optimizer.step()\n    optimizer.zero_grad()\n", "    with without_update(optimizer):\n        optimizer.step()\n    optimizer.zero_grad()\n"),
            "when it steps": ("        optimizer_step_base_func(optimizer, *args, **kwargs)\n\n        # Update", "        first_step_of(optimizer, optimizer_step_base_func)(optimizer, *args, **kwargs)\n\n        # Update"),
            "by a decorator": ("@experimental_api\ndef fully_shard_optimizer(", "@experimental_api\n@without_update\ndef fully_shard_optimizer("),
            "from the outside": appended("fully_shard_optimizer = without_update(fully_shard_optimizer)"),
        },
        tree=megatron,
    ),
    "inner projections of single experts": Otherwise(
        latent_moe_fc2_init,
        latent_moe_fc2_init.SINGLE.module,
        edits={
            "with the inner method for all": ("init_method=not_none(self.config.output_layer_init_method)", "init_method=not_none(self.config.init_method)"),
            "by a method of its own": ("init_method=not_none(self.config.output_layer_init_method)", "init_method=method_of(self.config)"),
            "by another config": ("        self.linear_fc2 = submodules.linear_fc2(\n", "        self.config = config_of_experts(config)\n        self.linear_fc2 = submodules.linear_fc2(\n"),
            "begun again": ("            name=(name + \".linear_fc2\") if name is not None else None,\n        )\n", "            name=(name + \".linear_fc2\") if name is not None else None,\n        )\n        begin_again(self.linear_fc2, self.config)\n"),
            "by a base": ("class MLP(MegatronModule)", "class MLP(InnerProjections)"),
            "from the outside": appended("MLP.__init__ = beginning(MLP.__init__)"),
        },
        probe="probe_single",
        tree=megatron,
    ),
    "inner projections of grouped experts": Otherwise(
        latent_moe_fc2_init,
        latent_moe_fc2_init.GROUPED.module,
        edits={
            "with the inner method for all": ("init_method=not_none(self.config.output_layer_init_method)", "init_method=not_none(self.config.init_method)"),
            "by a method of its own": ("init_method=not_none(self.config.output_layer_init_method)", "init_method=method_of(self.config)"),
            "by another config": ("        self.linear_fc2 = submodules.linear_fc2(\n", "        self.config = config_of_experts(config)\n        self.linear_fc2 = submodules.linear_fc2(\n"),
            "begun again": ("        self.offload_expert_fc1 = (\n", "        begin_again(self.linear_fc2, self.config)\n        self.offload_expert_fc1 = (\n"),
            "by a base": ("class TEGroupedMLP(MegatronModule)", "class TEGroupedMLP(InnerProjections)"),
            "from the outside": appended("TEGroupedMLP.__init__ = beginning(TEGroupedMLP.__init__)"),
        },
        probe="probe_grouped",
        tree=megatron,
    ),
    "tokens of a rank": Otherwise(
        masked_aux_loss_tokens,
        masked_aux_loss_tokens.TARGET.module,
        edits={
            "summed in a copy": ("        local_tokens_per_expert, reduce_group\n", "        local_tokens_per_expert.clone(), reduce_group\n"),
            "counted from the map": ("local_num_tokens = local_tokens_per_expert.sum() / topk", "local_num_tokens = routing_map.sum() / topk"),
            "a share of all": ("local_num_tokens = local_tokens_per_expert.sum() / topk", "local_num_tokens = local_tokens_per_expert.sum() / topk / reduce_group.size()"),
            "in the code that asks": ("megatron.core.transformer.moe.router", "            valid_token_count=local_num_tokens,\n", "            valid_token_count=of_one_rank(local_num_tokens, self),\n"),
            "multiplied once": ("megatron.core.transformer.moe.router", "aux_loss * num_local_tokens * self.tp_cp_group.size()", "aux_loss * num_local_tokens"),
            "by a sum that is no change": ("megatron.core.tensor_parallel.mappings", "    torch.distributed.all_reduce(input_, group=group)\n", "    input_ = input_.clone()\n    torch.distributed.all_reduce(input_, group=group)\n"),
            "by a decorator": ("def get_tokens_per_expert_and_token_count(", "@of_shares\ndef get_tokens_per_expert_and_token_count("),
            "from the outside": appended("get_tokens_per_expert_and_token_count = of_shares(get_tokens_per_expert_and_token_count)"),
            "set on the router": ("megatron.core.transformer.moe.router", "class TopKRouter(", "get_tokens_per_expert_and_token_count = of_shares(get_tokens_per_expert_and_token_count)\n\n\nclass TopKRouter("),
        },
        tree=megatron,
    ),
    "hidden gradients": Otherwise(
        graph_hidden_recompute_grads,
        graph_hidden_recompute_grads.TARGET.module,
        edits={
            "given all": (graph_hidden_recompute_grads.GRAPHS, "self.get_connected_params(fwd_graph_outputs)", "tuple(self.base_module.parameters())"),
            "a walk into hooks": (graph_hidden_recompute_grads.GRAPHS, "    def get_connected_params(self, outputs):\n", "    def get_connected_params(self, outputs):\n        outputs = with_hidden(outputs)\n"),
            "not in a graph": ("megatron.core.tensor_parallel.random", "        if is_graph_warmup():\n            return run_function(*args)\n", "        if is_graph_warmup() or torch.cuda.is_current_stream_capturing():\n            return run_function(*args)\n"),
            "refused": ("megatron.core.transformer.transformer_config", "        if self.recompute_modules is None:\n", "        refuse_hidden(self)\n        if self.recompute_modules is None:\n"),
            "not in this layer": ("            if \"layernorm\" in self.config.recompute_modules:\n", "            if \"layernorm\" in self.config.recompute_modules and self.config.cuda_graph_impl != \"local\":\n"),
            "by a decorator": ("class TransformerLayer(", "@finding_all\nclass TransformerLayer("),
            "from the outside": appended("TransformerLayer.__init__ = finding_all(TransformerLayer.__init__)"),
        },
        tree=megatron,
    ),
    "kept inputs": Otherwise(
        residual_norm_recompute_alias,
        residual_norm_recompute_alias.TARGET.module,
        edits={
            "copied inputs": ("            outputs = run_function(*args)\n        ctx.save_for_backward", "            outputs = run_function(*(each.clone() for each in args))\n        ctx.save_for_backward"),
            "copies saved": ("        ctx.save_for_backward(*detach_variable(args))\n", "        ctx.save_for_backward(*(each.clone() for each in detach_variable(args)))\n"),
            "the first alone": ("        for output in self.outputs:\n            output.untyped_storage().resize_(0)", "        for output in self.outputs[:1]:\n            output.untyped_storage().resize_(0)"),
            "an argument more": ("    def checkpoint(self, run_function: Callable[[Unpack[_Ts]], _R], *args: Unpack[_Ts])", "    def checkpoint(self, run_function: Callable[[Unpack[_Ts]], _R], *args: Unpack[_Ts], kept=())"),
            "by a base": ("class CheckpointWithoutOutput(object)", "class CheckpointWithoutOutput(KeepingInputs)"),
            "by a decorator": ("    def checkpoint(self, run_function", "    @keeping_inputs\n    def checkpoint(self, run_function"),
            "from the outside": appended("CheckpointWithoutOutput.checkpoint = keeping_inputs(CheckpointWithoutOutput.checkpoint)"),
        },
        tree=megatron,
    ),
    "recipes": Otherwise(
        quant_recipe_stale_weights,
        quant_recipe_stale_weights.TARGET.module,
        edits={
            "always": ("            self.config.fp8 is not None\n", "            self.config is not None\n"),
            "by a property": ("            self.config.fp8 is not None\n", "            self.is_quantized\n"),
            "by the layers": ("                m.is_first_microbatch = True\n", "                m.begin_step()\n"),
            "by a base": ("class MegatronModule(torch.nn.Module)", "class MegatronModule(ToldOfSteps)"),
            "by a decorator": ("    def set_is_first_microbatch(", "    @of_recipes_too\n    def set_is_first_microbatch("),
            "from the outside": appended("MegatronModule.set_is_first_microbatch = of_recipes_too(MegatronModule.set_is_first_microbatch)"),
        },
        tree=lambda: archive("megatron_core-0.18.2"),
    ),
    "attention sinks": Otherwise(
        tp_attention_sinks,
        tp_attention_sinks.CORE,
        edits={
            "by an attribute": (_SINKS, _SINKS + '                setattr(self.softmax_offset, "tensor_model_parallel", True)\n'),
            "by a helper": (_SINKS, _SINKS + "                mark_as_share(self.softmax_offset)\n"),
            "in the code that makes them": ('            self.register_parameter(\n                "softmax_offset"', '            self.register_share(\n                "softmax_offset"'),
            "by the attention": (tp_attention_sinks.TARGET.module, "        self.checkpoint_core_attention = (\n", "        mark_as_share(self.core_attention)\n        self.checkpoint_core_attention = (\n"),
            "by a base": (tp_attention_sinks.TARGET.module, "class Attention(MegatronModule, ABC)", "class Attention(MarksSinks, ABC)"),
            "from the outside": (tp_attention_sinks.TARGET.module, "class CrossAttention(Attention)", "SelfAttention.__init__ = marking(SelfAttention.__init__)\n\n\nclass CrossAttention(Attention)"),
        },
        tree=megatron,
    ),
    "gradients of norms": Otherwise(
        tp_norm_gradients,
        tp_norm_gradients.TARGET.module,
        edits={
            "not with latent attention": ("config.qk_layernorm and (", "config.qk_layernorm and not config.multi_latent_attention and ("),
            "by more names": ('or "k_layernorm" in name', 'or "k_layernorm" in name or "out_norm" in name'),
            "by a question to each": ('config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)', "is_of_own_heads(param)"),
            "divided afterwards": ("    _allreduce_non_tensor_model_parallel_grads(model, config, tp_group)\n", "    _allreduce_non_tensor_model_parallel_grads(whole_ones_divided(model), config, tp_group)\n    _allreduce_non_tensor_model_parallel_grads(own_ones(model), config, tp_group)\n"),
            "averaged as the attention says": (tp_norm_gradients.ATTENTION, "        self.kv_layernorm = ", "        average(self.q_layernorm)\n        self.kv_layernorm = "),
            "as the net says": ("megatron.core.ssm.gated_delta_net.common", "        self.reset_parameters()\n", "        sum_over_ranks(self.out_norm)\n        self.reset_parameters()\n"),
            "in the backward of the net": ("megatron.core.ssm.gated_delta_net.common", "        y = self.out_norm(x)\n", "        y = summing(self.out_norm)(x)\n"),
            "by a base of the net": ("megatron.core.ssm.gated_delta_net.common", "class _GDNBase(MegatronModule)", "class _GDNBase(SumsNorms)"),
            "by a decorator": ("def _allreduce_non_tensor_model_parallel_grads(", "@of_parts\ndef _allreduce_non_tensor_model_parallel_grads("),
            "from the outside": appended("_allreduce_non_tensor_model_parallel_grads = of_parts(_allreduce_non_tensor_model_parallel_grads)"),
        },
        tree=megatron,
    ),
    "groups of a cross attention": Otherwise(
        explicit_tp_groups,
        explicit_tp_groups.CROSS.module,
        edits={
            "of the query alone": ('            name=(name + ".linear_q") if name is not None else None,\n', '            name=(name + ".linear_q") if name is not None else None,\n            tp_group=self.tp_group,\n'),
            "by a builder that knows it": ("        self.linear_q = submodules.linear_q(\n", "        submodules = with_groups(submodules, self.pg_collection)\n        self.linear_q = submodules.linear_q(\n"),
            "within the group": ("        self.linear_q = submodules.linear_q(\n", "        enter(self.tp_group)\n        self.linear_q = submodules.linear_q(\n"),
            "regrouped afterwards": ("        self.linear_kv = submodules.linear_kv(\n", "        regroup(self)\n        self.linear_kv = submodules.linear_kv(\n"),
            "from the outside": appended("CrossAttention.__init__ = within_groups(CrossAttention.__init__)"),
        },
        probe="probe_cross",
        tree=megatron,
    ),
    "groups of latents": Otherwise(
        explicit_tp_groups,
        explicit_tp_groups.LATENT.module,
        edits={
            "by its own helper": ("from megatron.core.tensor_parallel.mappings import (", "from vendor.mappings import ("),
            "before they are split": ("        q_compressed, kv_combined = self._qkv_down_projection(hidden_states)\n", "        q_compressed, kv_combined = gathered(self, self._qkv_down_projection(hidden_states))\n"),
            "of queries alone": ("                q_compressed = gather_from_tensor_model_parallel_region(q_compressed)\n", "                q_compressed = gather_from_tensor_model_parallel_region(q_compressed, group=self.tp_group)\n"),
            "in a forward of its own": ("class MLASelfAttention(MultiLatentAttention):\n", "class MLASelfAttention(MultiLatentAttention):\n    def forward(self, *given):\n        with self.tp_group:\n            return super().forward(*given)\n\n"),
            "by the helper": ("megatron.core.utils", "    if tp_group is None:\n        if torch", "    if tp_group is None:\n        tp_group = innermost()\n    if tp_group is None:\n        if torch"),
        },
        probe="probe_latent",
        tree=megatron,
    ),
    "shares of gathered logits": Otherwise(
        gathered_logits_loss,
        gathered_logits_loss.TARGET.module,
        edits={
            "by a helper": (_LABELS_FIRST, "        logits = share_of(self, logits)\n" + _LABELS_FIRST),
            "refused": (_LABELS_FIRST, "        assert not self.gathers\n" + _LABELS_FIRST),
            "by another cross entropy": ("loss = tensor_parallel.vocab_parallel_cross_entropy(", "loss = cross_entropy_of_any("),
            "by a base": ("class LanguageModule(MegatronModule)", "class LanguageModule(TakesShares)"),
            "by a decorator": ("    def compute_language_model_loss(", "    @of_shares\n    def compute_language_model_loss("),
            "from the outside": appended("LanguageModule.compute_language_model_loss = of_shares(LanguageModule.compute_language_model_loss)"),
        },
        tree=megatron,
    ),
    "counter of a restored schedule": Otherwise(
        scheduler_restore,
        scheduler_restore.TARGET.module,
        edits={
            "by the difference": (COUNTED, "        self.step(increment=num_steps - self.num_steps)\n"),
            "zeroed at first": ("        if 'start_lr' in state_dict:\n", "        self.num_steps = 0\n        if 'start_lr' in state_dict:\n"),
            "by a helper": (COUNTED, "        self._jump_to(num_steps)\n"),
            "by a helper at first": ("        if 'start_lr' in state_dict:\n", "        self.reset()\n        if 'start_lr' in state_dict:\n"),
            "by a copy of the state": ("        if 'start_lr' in state_dict:\n", "        state_dict = self._since(state_dict)\n        if 'start_lr' in state_dict:\n"),
            "by a step with an origin": ("    def step(self, increment: int)", "    def step(self, increment: int, since: int | None = None)"),
            "by a base": ("class OptimizerParamScheduler:", "class OptimizerParamScheduler(SetsCounter):"),
            "by a decorator": ("    def load_state_dict(", "    @of_zero\n    def load_state_dict("),
            "from the outside": appended("OptimizerParamScheduler.load_state_dict = of_zero(OptimizerParamScheduler.load_state_dict)"),
        },
        tree=megatron,
    ),
    "cached loss mask": Otherwise(
        loss_mask_cache,
        loss_mask_cache.TARGET.module,
        edits={
            "masked in a copy": ("        loss_mask[labels == self._pad_token_id] = 0.0\n", "        loss_mask = loss_mask.clone()\n        loss_mask[labels == self._pad_token_id] = 0.0\n"),
            "masked by a product": ("        loss_mask[labels == self._pad_token_id] = 0.0\n", "        loss_mask = loss_mask * (labels != self._pad_token_id)\n"),
            "made one of ones later": ("        # Batch padding sequence so we mask the loss\n", "        self.cached_loss_mask = torch.ones_like(loss_mask)\n"),
            "by a helper": ("                self.cached_loss_mask = loss_mask\n", "                self._cache_loss_mask(loss_mask)\n"),
            "of no padded sample": ("            if self.masks_and_position_ids_are_cacheable:\n", "            if self.masks_and_position_ids_are_cacheable and not (labels == self._pad_token_id).any():\n"),
            "with ends of documents": ("                self.config.eod_mask_loss,\n            ]\n", "            ]\n"),
            "of weights": ("    loss_mask = torch.ones(seq_length", "    loss_mask = weights_of(seq_length"),
            "by a decorator": ("    def __getitem__(self, idx: Optional[int])", "    @of_a_copy\n    def __getitem__(self, idx: Optional[int])"),
            "from the outside": appended("GPTDataset.__getitem__ = of_a_copy(GPTDataset.__getitem__)"),
        },
        tree=megatron,
    ),
    "streams of expert ranks": Otherwise(
        expert_rng_resume,
        expert_rng_resume.TARGET.module,
        edits={
            "of all ranks": ("    rng_state_list = None\n", "    rng_state['expert_states'] = gathered(dp_cp_group)\n    rng_state_list = None\n"),
            "by another rank": ("            replica_id=dp_cp_rank,\n", "            replica_id=(dp_cp_rank, mpu.get_expert_data_parallel_rank()),\n"),
            "of other states": ("tensor_parallel.get_cuda_rng_tracker().get_states(),\n    }", "tensor_parallel.get_all_rng_states(),\n    }"),
            "of several": ("        rng_state_list = [rng_state]\n", "        rng_state_list = states_of(rng_state)\n"),
            "read otherwise": ("                    rng_state = rng_state[0]\n", "                    rng_state = rng_state[dp_cp_rank]\n"),
            "taken over otherwise": ("            cuda_rng_tracker.set_states(rng_tracker_states)\n", "            cuda_rng_tracker.set_states(of_experts(rng_tracker_states))\n"),
            "seeded otherwise": (expert_rng_resume.STREAMS, "    _CUDA_RNG_STATE_TRACKER.add(_EXPERT_PARALLEL_RNG_TRACKER_NAME, expert_parallel_seed)\n", "    add_streams(expert_parallel_seed)\n"),
            "by a decorator": ("def get_rng_state(", "@of_experts\ndef get_rng_state("),
            "from the outside": appended("get_rng_state = of_experts(get_rng_state)"),
        },
        tree=megatron,
    ),
    "clipped heads of grouped queries": Otherwise(
        qk_clip_negative_head,
        qk_clip_negative_head.GROUPED.module,
        edits={
            "floored before": ("        if torch.any(grouped_max_attn_logits >", "        grouped_max_attn_logits = grouped_max_attn_logits.clamp(min=1e-6)\n        if torch.any(grouped_max_attn_logits >"),
            "floored afterwards": ("            assert torch.all(self.qk_clip_balancing_eta <= 1.0)\n", "            self.qk_clip_balancing_eta = self.qk_clip_balancing_eta.abs()\n"),
            "of absolute logits": ("        if torch.any(grouped_max_attn_logits >", "        self.core_attention.current_max_attn_logits.abs_()\n        if torch.any(grouped_max_attn_logits >"),
            "of other groups": ("self.num_query_groups_per_partition, -1\n            ),\n            dim=1", "-1, self.num_query_groups_per_partition\n            ),\n            dim=0"),
            "for some heads": ("        if torch.any(grouped_max_attn_logits >", "        if torch.all(grouped_max_attn_logits >"),
            "kept for another time": ("        # reset current_max_attn_logits\n        self.core_attention.current_max_attn_logits = None", "        self.seen = self.core_attention.current_max_attn_logits"),
            "from the outside": appended("SelfAttention.clip_qk = floored(SelfAttention.clip_qk)"),
        },
        tree=megatron,
    ),
    "clipped heads of latent attention": Otherwise(
        qk_clip_negative_head,
        qk_clip_negative_head.LATENT.module,
        edits={
            "floored before": ("        if torch.any(self.core_attention.current_max_attn_logits >", "        self._floor()\n        if torch.any(self.core_attention.current_max_attn_logits >"),
            "floored afterwards": ("            assert torch.all(self.qk_clip_balancing_eta <= 1.0)\n", "            self.qk_clip_balancing_eta = self.qk_clip_balancing_eta.abs()\n"),
            "by a helper": ("            assert torch.all(self.qk_clip_balancing_eta <= 1.0)\n", "            self._check_eta()\n"),
            "by a decorator": ("    def clip_qk(", "    @floored\n    def clip_qk("),
            "from the outside": appended("MLASelfAttention.clip_qk = floored(MLASelfAttention.clip_qk)"),
        },
        probe="probe_latent",
        tree=megatron,
    ),
    "balancing over the global batch": Otherwise(
        global_aux_loss_scale,
        global_aux_loss_scale.TARGET.module,
        edits={
            "by a helper": (ATTACHED_GLOBALLY, "        global_aux_loss = self._over_ranks(global_aux_loss)\n" + ATTACHED_GLOBALLY),
            "by the coefficient": ("            moe_aux_loss_coeff=global_aux_loss_coeff,\n", "            moe_aux_loss_coeff=global_aux_loss_coeff * self.data_parallel_ranks,\n"),
            "by all coefficients": ("        if isinstance(self.routing_type, str):\n            if self.routing_type == aux_loss_type:\n                return self.config.moe_aux_loss_coeff\n", "        if isinstance(self.routing_type, str):\n            if self.routing_type == aux_loss_type:\n                return self.config.moe_aux_loss_coeff * self.tp_dp_cp_group.size()\n"),
            "over tokens of a batch": ("            total_num_tokens=total_num_tokens,\n            topk=self.topk,\n            num_experts=self.config.num_moe_experts,\n            moe_aux_loss_coeff=global", "            total_num_tokens=local_num_tokens,\n            topk=self.topk,\n            num_experts=self.config.num_moe_experts,\n            moe_aux_loss_coeff=global"),
            "where it is attached": ("            activation = MoEAuxLossAutoScaler.apply(activation, aux_loss)\n", "            activation = MoEAuxLossAutoScaler.apply(activation, self._over_ranks(aux_loss, aux_loss_name))\n"),
            "before it is logged": ("        num_layers = self.config.num_layers\n        if self.config.mtp_num_layers is not None:\n            num_layers += self.config.mtp_num_layers\n\n        if self.is_mtp_layer:\n", "        if aux_loss_name.startswith('global'):\n            aux_loss = aux_loss * self.data_parallel_ranks\n        num_layers = self.config.num_layers\n        if self.is_mtp_layer:\n"),
            "in the loss": (global_aux_loss_scale.UTILS, "        num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens)\n", "        num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * probs.shape[0])\n"),
            "by a decorator": ("    def _apply_global_aux_loss(", "    @over_ranks\n    def _apply_global_aux_loss("),
            "from the outside": appended("TopKRouter._apply_global_aux_loss = over_ranks(TopKRouter._apply_global_aux_loss)"),
        },
        tree=megatron,
    ),
    "one rank's gradients": Otherwise(
        fsdp_lone_rank_gradients,
        fsdp_lone_rank_gradients.TARGET.module,
        edits={
            "a shard of one": ("is_data_distributed=is_grad_buffer_distributed and main_buf_dp_group.size() > 1,\n                    dtype=group.grad_dtype", "is_data_distributed=is_grad_buffer_distributed,\n                    dtype=group.grad_dtype"),
            "by a buffer of its own": ("group.main_grad_buffer = DataParallelBuffer(", "group.main_grad_buffer = buffer_class(main_buf_dp_group)("),
            "scaled by the size of the group": ("def gradient_reduce_preprocessing(grad_data, scaling_factor, ddp_config):", "def gradient_reduce_preprocessing(grad_data, scaling_factor, ddp_config, group_size=None):"),
            "added where it is another's": ("                    local_grad += reduced_grad\n", "                    add_unless_same(local_grad, reduced_grad)\n"),
            "reduced at the end": ("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp", "            if grad_reduce_every_bprop or is_last_microbatch or self.model_auto_sync:\n", "            param_list = self.due(param_list)\n            if grad_reduce_every_bprop or is_last_microbatch or self.model_auto_sync:\n"),
            "from the outside": appended("GradReducePipeline._bucket_group_gradient_reduce = apart(GradReducePipeline._bucket_group_gradient_reduce)"),
        },
        tree=megatron,
    ),
    "unsharded gradients": Otherwise(
        fsdp_reduced_twice,
        fsdp_reduced_twice.TARGET.module,
        edits={
            "left by the hooks": ("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp", "            if grad_reduce_every_bprop or is_last_microbatch or self.model_auto_sync:\n", "            if grad_reduce_every_bprop or self.reduces_now(is_last_microbatch):\n"),
            "left by the step": ("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp", "            # Synchronous gradient all-reduce when sharding optimizer state or not sharding.\n", "            if self.is_reduced:\n                return\n"),
            "left by the pipeline": ("        params = sorted(list(params), key=lambda x: self.buffer.param_to_param_group[x])\n        for param in params:\n            bucket_id", "        if self.is_left_to_the_step():\n            return\n        params = sorted(list(params), key=lambda x: self.buffer.param_to_param_group[x])\n        for param in params:\n            bucket_id"),
            "once for a buffer": ("        reduce_scatter_ops = []\n", "        reduce_scatter_ops = []\n        if self.is_reduced:\n            return\n"),
            "from the outside": appended("GradReducePipeline.reduce_gradients = once(GradReducePipeline.reduce_gradients)"),
        },
        tree=megatron,
    ),
    "experts in norms": Otherwise(
        expert_grad_norm,
        expert_grad_norm.TARGET.module,
        edits={
            "all but those of layers": ("    if hasattr(param, \"tensor_model_parallel\") and param.tensor_model_parallel:\n        return True\n", "    if getattr(param, \"tensor_model_parallel\", not getattr(param, \"allreduce\", True)):\n        return True\n"),
            "by a group of their own": ("        return tp_group.rank() == 0\n", "        return _group_of(param, tp_group).rank() == 0\n"),
            "by a rank of their own": ("    return get_tensor_model_parallel_rank() == 0\n\n\ndef set_tensor", "    return _rank_of(param) == 0\n\n\ndef set_tensor"),
            "by a decorator": ("def param_is_not_tensor_parallel_duplicate(", "@experts_first\ndef param_is_not_tensor_parallel_duplicate("),
            "in copies": ("    for attribute in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:\n        maybe_copy(attribute)\n", "    for attribute in (*_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS, \"allreduce\"):\n        maybe_copy(attribute)\n"),
            "from the outside": appended("param_is_not_tensor_parallel_duplicate = experts_first(param_is_not_tensor_parallel_duplicate)"),
        },
        tree=lambda: archive("megatron_core-0.18.2"),
    ),
    "marks of experts": Otherwise(
        expert_gradient_groups,
        expert_gradient_groups.TARGET.module,
        edits={
            "by sizes": ("megatron.core.tensor_parallel.layers", "        self.expert_parallel = config.expert_model_parallel_size > 1\n", "        self.expert_parallel = config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size != config.tensor_model_parallel_size\n"),
            "all of them": ("megatron.core.tensor_parallel.layers", '            setattr(self.weight, "allreduce", not (self.is_expert and self.expert_parallel))\n        else:', '            setattr(self.weight, "allreduce", not self.is_expert)\n        else:'),
            "with the number": ("        self.router.set_layer_number(layer_number)\n", "        self.router.set_layer_number(layer_number)\n        mark_experts(self.experts)\n"),
            "by a decorator": ("    def set_layer_number(self, layer_number: int):\n", "    @of_marked_experts\n    def set_layer_number(self, layer_number: int):\n"),
            "from the outside": appended("BaseMoELayer.set_layer_number = of_marked_experts(BaseMoELayer.set_layer_number)"),
        },
        tree=lambda: archive("megatron_core-0.18.2"),
    ),
    "groups of a layer-wise optimizer": Otherwise(
        layerwise_norm_groups,
        layerwise_norm_groups.TARGET.module,
        edits={
            "by a helper": ("        super().__init__(optimizers)\n", "        super().__init__(optimizers)\n        self._give_groups()\n"),
            "in zeros": ("            use_decoupled_grad=self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,\n", "            use_decoupled_grad=self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,\n            tp_group=self.dp_cp,\n"),
            "in norms": ("            grads_for_norm += optimizer.get_grads_for_grad_norm()\n", "            grads_for_norm += optimizer.get_grads_for_grad_norm() + self._of_experts(optimizer)\n"),
            "by a decorator": ("    @torch.no_grad()\n    def count_zeros(self):\n", "    @torch.no_grad()\n    @with_groups\n    def count_zeros(self):\n"),
            "in the test of replicas": ("megatron.core.tensor_parallel.layers", "        return tp_group.rank() == 0\n", "        return tp_group is None or tp_group.rank() == 0\n"),
            "in the code that asks for them": (layerwise_norm_groups.OPTIMIZER, "                expert_tp_group=getattr(self, 'expert_tp_group', None),\n            )\n", "                expert_tp_group=self._expert_group(),\n            )\n"),
            "from the outside": appended("LayerWiseDistributedOptimizer.__init__ = with_groups(LayerWiseDistributedOptimizer.__init__)"),
        },
        tree=megatron,
    ),
    "copies of an offloaded optimizer": Otherwise(
        cpu_offload_reload,
        cpu_offload_reload.TARGET.module,
        edits={
            "by a helper": (REFRESHED, "            self._refresh_copies()\n            return\n"),
            "as for any other": (REFRESHED, "            self.optimizer.update_fp32_param_by_new_param()\n"),
            "afterwards": (REFRESHED, "            self.optimizer.update_fp32_param_by_new_param()\n            self._refresh_copies()\n            return\n"),
            "of all copies": (cpu_offload_reload.COPIES, "        for param, fp32_param in self.param_to_fp32_param.items():\n", "        for param, fp32_param in self.param_to_inner_param.items():\n"),
            "copies that are not kept": (cpu_offload_reload.COPIES, "                self.param_to_inner_param[param] = inner_param\n", "                self._keep(param, inner_param)\n"),
            "main weights otherwise": ("        copy_group_params(self.model_float16_groups, self.shard_fp32_from_float16_groups)\n        copy_group_params(self.model_fp32", "        self._copy_groups()\n        copy_group_params(self.model_fp32"),
            "by a decorator": ("    def _copy_model_params_to_main_params(", "    @of_copies\n    def _copy_model_params_to_main_params("),
            "from the outside": appended("DistributedOptimizer._copy_model_params_to_main_params = of_copies(DistributedOptimizer._copy_model_params_to_main_params)"),
        },
        tree=megatron,
    ),
    "marked layers": Otherwise(
        hybrid_mtp_aux_loss,
        hybrid_mtp_aux_loss.TARGET.module,
        edits={
            "marked afterwards": ("            self.layers.append(layer)\n", "            self.layers.append(told(layer, is_mtp_layer))\n"),
            "by their number": ("            layer_number = i + 1 + pp_layer_offset\n", "            layer_number = numbered(i + 1 + pp_layer_offset, is_mtp_layer)\n"),
            "by the config": ("        self.is_mtp_layer = is_mtp_layer\n", "        self.is_mtp_layer = is_mtp_layer\n        self.config = config_of_predictions(config, is_mtp_layer)\n"),
            "by the specification": ("                        submodules.moe_layer,\n", "                        of_predictions(submodules, is_mtp_layer),\n"),
            "by all arguments": ("                        submodules.moe_layer,\n", "                        submodules.moe_layer,\n                        **common,\n"),
            "the loss by the coefficient": ("megatron.core.transformer.moe.router", "            aux_loss = aux_loss / self.config.mtp_num_layers\n", "            aux_loss = aux_loss / self.times_used()\n"),
            "from the outside": appended("HybridStack.__init__ = telling(HybridStack.__init__)"),
        },
        tree=megatron,
    ),
    "divided z-loss": Otherwise(
        mtp_z_loss,
        mtp_z_loss.TARGET.module,
        edits={
            "by the coefficient": ("moe_z_loss_coeff = self.config.moe_z_loss_coeff / self.tp_cp_group.size()", "moe_z_loss_coeff = self.coefficient() / self.tp_cp_group.size()"),
            "by the function": ("z_loss = z_loss_func(logits, moe_z_loss_coeff, padding_mask=padding_mask)", "z_loss = z_loss_func(logits, moe_z_loss_coeff, padding_mask=padding_mask, times=self.times_used())"),
            "where it is attached": ("                logits = MoEAuxLossAutoScaler.apply(logits, z_loss)\n", "                logits = MoEAuxLossAutoScaler.apply(logits, z_loss / self.times_used())\n"),
            "with another class": ("                logits = MoEAuxLossAutoScaler.apply(logits, z_loss)\n", "                logits = OncePerLayer.apply(logits, z_loss)\n"),
            "once alone": ("        if self.config.moe_z_loss_coeff is not None and self.training", "        if self.is_first_use() and self.config.moe_z_loss_coeff is not None and self.training"),
            "from the outside": appended("TopKRouter.apply_z_loss = once_per_layer(TopKRouter.apply_z_loss)"),
        },
        tree=megatron,
    ),
    "packed shards": Otherwise(
        seq_aux_loss_packed,
        seq_aux_loss_packed.TARGET.module,
        edits={
            "gathered by the layer": ("        pre_mlp_layernorm_output, padding_mask, moe_unflatten_mbs = self._maybe_unflatten_for_moe(\n            pre_mlp_layernorm_output, padding_mask,", "        pre_mlp_layernorm_output, padding_mask, moe_unflatten_mbs = self._maybe_unflatten_for_moe(\n            gathered(pre_mlp_layernorm_output), padding_mask,"),
            "gathered within": ("        tokens_per_sample = packed_seq_params.tokens_per_sample\n", "        tokens_per_sample = packed_seq_params.tokens_per_sample\n        hidden_states = gathered(hidden_states)\n"),
            "as long as a shard": ("        tokens_per_sample = packed_seq_params.tokens_per_sample\n", "        tokens_per_sample = packed_seq_params.tokens_per_sample // shards()\n"),
            "by the router": (seq_aux_loss_packed.ROUTER_TARGET.module, "        scores_for_aux_loss = scores_for_aux_loss.reshape(seq_length, -1)\n", "        scores_for_aux_loss, seq_length = of_samples(scores_for_aux_loss, seq_length)\n"),
            "in the caller of the loss": (seq_aux_loss_packed.ROUTER_TARGET.module, "        seq_length, bsz = logits.shape[:2]\n", "        seq_length, bsz = self.of_whole_batch(logits)\n"),
            "in the code that counts": ("megatron.core.transformer.moe.moe_utils", "    local_tokens_per_expert = routing_map.sum(dim=0)\n", "    local_tokens_per_expert = by_sample(routing_map)\n"),
            "in the other layer": ("            hidden_states, padding_mask, moe_unflatten_mbs = self._maybe_unflatten_for_moe(\n                hidden_states,", "            hidden_states, padding_mask, moe_unflatten_mbs = self._maybe_unflatten_for_moe(\n                gathered(hidden_states),"),
            "from the outside": appended("TransformerLayer._maybe_unflatten_for_moe = of_shards(TransformerLayer._maybe_unflatten_for_moe)"),
        },
        tree=megatron,
    ),
    "masked counts": Otherwise(
        expert_bias_padding_mask,
        expert_bias_padding_mask.TARGET.module,
        edits={
            "widened by its caller": ("self._apply_expert_bias(routing_map, padding_mask=padding_mask)", "self._apply_expert_bias(routing_map, padding_mask=widened(padding_mask))"),
            "taken out by its caller": ("self._apply_expert_bias(routing_map, padding_mask=padding_mask)", "self._apply_expert_bias(without(routing_map, padding_mask))"),
            "rows alone": ("routing_map & (~padding_mask)", "routing_map[~padding_mask]"),
            "an axis of its own": ("routing_map & (~padding_mask)", "routing_map & (~padding_mask)[:, None]"),
            "by a function": ("routing_map & (~padding_mask)", "without(routing_map, padding_mask)"),
            "not at all": ("self._apply_expert_bias(routing_map, padding_mask=padding_mask)", "self._apply_expert_bias(routing_map)"),
            "from the outside": appended("TopKRouter._apply_expert_bias = masking_tokens(TopKRouter._apply_expert_bias)"),
        },
        tree=megatron,
    ),
    "masks of stages": Otherwise(
        pipeline_padding_mask,
        pipeline_padding_mask.TARGET.module,
        edits={
            "in the other branch": ("            decoder_input = None\n\n", "            decoder_input = None\n            padding_mask = of_rank(padding_mask)\n\n"),
            "by forward": ("        preproc_output = self._preprocess(\n", "        padding_mask = of_rank(padding_mask)\n        preproc_output = self._preprocess(\n"),
            "in the group": ("                        padding_mask.transpose(0, 1).contiguous()\n", "                        padding_mask.transpose(0, 1).contiguous(), group=self.pg_collection.tp\n"),
            "at the end": ("            sequence_len_offset,\n            padding_mask,\n        )\n", "            sequence_len_offset,\n            of_rank(padding_mask),\n        )\n"),
            "for masks that are too long": ("            if padding_mask is not None and self.config.sequence_parallel:\n", "            if is_whole(padding_mask, self):\n"),
            "from the outside": appended("GPTModel._preprocess = cutting(GPTModel._preprocess)"),
            "by the MoE layer": ("megatron.core.transformer.moe.moe_layer", "        # Transpose from [bsz, seq_length] to [seq_length, bsz] to align with hidden_states\n", "        padding_mask = cut_if_too_long(padding_mask, hidden_states)\n"),
        },
        said={
            "by the MoE layer": (Verdict.BROKEN, "what cuts a mask that is too long, as dev's does, leaves alone what is cut"),
        },
        tree=megatron,
    ),
    "blocks of heads": Otherwise(
        mla_rope_head_blocks,
        mla_rope_head_blocks.TARGET.module,
        edits={
            "by the configurations": ('        triton.Config({"BLOCK_H": 2}),\n', ""),
            "pruned by the heads": ('    key=["emb_dim", "head_num"],\n', '    key=["emb_dim", "head_num"],\n    prune_configs_by={"early_config_prune": dividing},\n'),
            "by the grid": ("triton.cdiv(nheads, META[\"BLOCK_H\"])", "whole_blocks(nheads, META[\"BLOCK_H\"])"),
            "into another tensor": ("            q,\n            cos,\n            sin,\n            qk_head_dim,\n            emb_dim,\n            nheads,", "            copied(q),\n            cos,\n            sin,\n            qk_head_dim,\n            emb_dim,\n            nheads,"),
            "with a barrier": ("    x_left = x_1 * cos_left - x_2 * sin_left\n", "    tl.debug_barrier()\n    x_left = x_1 * cos_left - x_2 * sin_left\n"),
            "without the kernels": ("def fused_apply_mla_rope_for_q(\n", "def of_old(\n"),
            "from the outside": appended("ApplyMLARotaryEmbQ.forward = in_plain_pytorch"),
        },
        tree=megatron,
    ),
    "tokens of predictions": Otherwise(
        mtp_token_counts_local,
        mtp_token_counts_local.TARGET.module,
        edits={
            "by a helper": ("    original_num_tokens = loss_mask.sum()\n", "    original_num_tokens = summed_over_ranks(loss_mask.sum())\n"),
            "the ratio by a helper": ("(original_num_tokens / num_tokens_safe)", "ratio_of_all(original_num_tokens, num_tokens_safe)"),
            "by the roll": ("        return rolled_tensor, rolled_tensor.sum()\n", "        return rolled_tensor, tokens_of_all(rolled_tensor)\n"),
            "no ratio any more": ("mtp_loss_scale * mtp_loss * (original_num_tokens / num_tokens_safe)", "mtp_loss_scale * mtp_loss"),
            "on the way back": ("        return grad_output, scaled_mtp_loss_grad\n", "        return grad_output, scaled_mtp_loss_grad * ratio_of_all()\n"),
            "by the config": ("        mtp_loss_scale = config.mtp_loss_scaling_factor / config.mtp_num_layers\n", "        mtp_loss_scale = config.mtp_loss_scaling_factor / config.mtp_num_layers * config.ratio()\n"),
            "refused": ("    original_num_tokens = loss_mask.sum()\n", "    original_num_tokens = loss_mask.sum()\n    assert cp_group is None or cp_group.size() == 1\n"),
            "by another function": ("            hidden_states = MTPLossAutoScaler.apply(hidden_states, mtp_loss_normalized)\n", "            hidden_states = OfAllTokens.apply(hidden_states, mtp_loss_normalized)\n"),
            "a parameter more": ("    input_ids: Optional[Tensor] = None,\n) -> Tensor:\n    \"\"\"Process", "    input_ids: Optional[Tensor] = None,\n    token_ratio: Optional[Tensor] = None,\n) -> Tensor:\n    \"\"\"Process"),
            "from the outside": appended("process_mtp_loss = of_all_tokens(process_mtp_loss)"),
        },
        tree=megatron,
    ),
    "rotary keys": Otherwise(
        mla_rope_key_gradient,
        mla_rope_key_gradient.TARGET.module,
        edits={
            "copied without sequence parallelism": ("                k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb, group=self.tp_group)\n", "                k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb, group=self.tp_group)\n            else:\n                k_pos_emb = copy_to_tensor_model_parallel_region(k_pos_emb, group=self.tp_group)\n"),
            "by a hook": ("        if packed_seq_params is not None:\n            # If sequence packing, TE", "        k_pos_emb.register_hook(self.sum_over_ranks)\n        if packed_seq_params is not None:\n            # If sequence packing, TE"),
            "behind the rotation": ("                # query: [num_tokens, n, (qk_head_dim + v_head_dim)]\n                query =", "                k_pos_emb = of_all_heads(k_pos_emb, self.tp_group)\n                query ="),
            "in the down projection": ("        kv_combined, _ = self.linear_kv_down_proj(hidden_states)\n        return", "        kv_combined, _ = self.linear_kv_down_proj(hidden_states)\n        kv_combined = of_all_heads(kv_combined, self.config, self.tp_group)\n        return"),
            "in the fused one": ("        q_compressed, kv_combined = torch.split(qkv, [q_split, kv_split], dim=-1)\n", "        q_compressed, kv_combined = torch.split(qkv, [q_split, kv_split], dim=-1)\n        kv_combined = of_all_heads(kv_combined, self.config, self.tp_group)\n"),
            "by the constructor": ("        if self.config.q_lora_rank is not None:\n            self.q_layernorm = layer_classes", "        sum_over_ranks(self.linear_kv_down_proj.weight)\n        if self.config.q_lora_rank is not None:\n            self.q_layernorm = layer_classes"),
            "at the keys": ("        query = qkv_linear_manager.group_offload(", "        key = of_all_heads(key, self.tp_group)\n        query = qkv_linear_manager.group_offload("),
            "in a forward of its own": ("    def _resolve_qk_norm_config(", "    def forward(self, *args, **kwargs):\n        return of_all_heads(super().forward, self.tp_group)(*args, **kwargs)\n\n    def _resolve_qk_norm_config("),
            "from the outside": appended("MLASelfAttention._qkv_down_projection = of_all_heads(MLASelfAttention._qkv_down_projection)"),
            "keys go another way": appended("MLASelfAttention.__getattribute__ = of_all_heads"),
            "by the gather": ("megatron.core.tensor_parallel.mappings", "        return _split_along_last_dim(grad_output, ctx.group), None", "        return _reduce_scatter_along_last_dim(grad_output, ctx.group), None"),
            "another gather": ("    gather_from_tensor_model_parallel_region,\n", "    all_gather_last_dim_from_tensor_parallel_region as gather_from_tensor_model_parallel_region,\n"),
            "once gradients are there": ("megatron.core.distributed.finalize_model_grads", "                    config.qk_layernorm and (\"q_layernorm\" in name or \"k_layernorm\" in name)\n", "                    config.qk_layernorm and (\"q_layernorm\" in name or \"k_layernorm\" in name)\n                    or \"kv_down_proj\" in name\n"),
            "refused": ("        qkv_linear_manager = off_interface(", "        assert self.config.sequence_parallel or self.config.tensor_model_parallel_size == 1\n        qkv_linear_manager = off_interface("),
        },
        tree=megatron,
    ),
    "context losses": Otherwise(
        cp_local_loss_mean,
        cp_local_loss_mean.TARGET.module,
        edits={
            "by a helper": ("output_tensor /= torch.clamp(num_tokens, min=1)", "output_tensor /= mean_over_ranks(torch.clamp(num_tokens, min=1))"),
            "by the loss function": ("            outputs = loss_func(output_tensor)\n", "            outputs = counted_by_all(loss_func(output_tensor))\n"),
            "by its caller": ("        output_tensor,\n        loss_func,\n        config,\n", "        output_tensor,\n        of_all_ranks(loss_func),\n        config,\n"),
            "behind the division": ("    output_tensor, num_tokens = forward_step_calc_loss(", "    output_tensor, num_tokens = weighted("),
            "refused": ("                    # Protect against division by zero", "                    assert cp_group_size == 1\n                    # Protect against division by zero"),
            "summed, as if per token": ("                if not config.calculate_per_token_loss:\n", "                if not config.calculate_per_token_loss and cp_group_size == 1:\n"),
            "weighted by DDP": ("megatron.core.distributed.distributed_data_parallel", "gradient_scaling_factor = 1.0 / data_parallel_world_size", "gradient_scaling_factor = self.weight / data_parallel_world_size"),
            "from the outside": appended("forward_step_calc_loss = of_all_ranks(forward_step_calc_loss)"),
        },
        tree=megatron,
    ),
    "smoothed labels": Otherwise(
        tp_label_smoothing,
        tp_label_smoothing.TARGET.module,
        edits={
            "by a helper": ("mean_log_probs = log_probs.mean(dim=-1)", "mean_log_probs = mean_over_ranks(log_probs, tp_group)"),
            "gathered by the entry": ("    return _VocabParallelCrossEntropy.apply(", "    if label_smoothing > 0:\n        return smoothed(gathered(vocab_parallel_logits, tp_group), target, label_smoothing)\n    return _VocabParallelCrossEntropy.apply("),
            "by another function": ("    return _VocabParallelCrossEntropy.apply(", "    return SmoothedCrossEntropy.apply("),
            "from logits": ("            mean_log_probs = log_probs.mean(dim=-1)\n", "            mean_log_probs = mean_logits - torch.log(sum_exp_logits)\n"),
            "refused": ("            assert 1.0 > label_smoothing > 0.0\n", "            assert 1.0 > label_smoothing > 0.0\n            assert world_size == 1\n"),
            "not smoothed": ("        vocab_size = exp_logits.size(-1)\n", "        vocab_size = exp_logits.size(-1)\n        label_smoothing = label_smoothing if world_size == 1 else 0.0\n"),
            "the count alone": ("        vocab_size = exp_logits.size(-1)\n", "        vocab_size = exp_logits.size(-1) * world_size\n"),
            "the gradient alone": ("label_smoothing, vocab_size = ctx.label_smoothing, ctx.vocab_size", "label_smoothing, vocab_size = ctx.label_smoothing, whole_vocabulary(ctx)"),
            "by the normalised values": ("        return exp_logits, loss\n\n    @staticmethod", "        return Smoothed(exp_logits), loss\n\n    @staticmethod"),
            "from the outside": appended("_VocabParallelCrossEntropy.forward = staticmethod(smoothed(_VocabParallelCrossEntropy.forward))"),
        },
        tree=megatron,
    ),
    "ids": Otherwise(
        float16_optimizer_state_ids,
        float16_optimizer_state_ids.TARGET.module,
        edits={
            "every group": (_IDS, "chain.from_iterable(group['params'] for group in self.optimizer.param_groups)"),
            "by the state": ("        id_to_sharded_param_map = get_param_id_to_sharded_param_map(\n            model_sharded_state_dict, chain.from_iterable(g for g in self.float16_groups)\n", "        id_to_sharded_param_map = ids_of(\n            model_sharded_state_dict, state_dict['optimizer']\n"),
            "renumbered": (_CONVERTED, f"        id_to_sharded_param_map = renumbered(id_to_sharded_param_map, self.optimizer)\n{_CONVERTED}"),
            "by name": (_CONVERTED, f"        return sharded_by_name(self, model_sharded_state_dict, state_dict)\n{_CONVERTED}"),
            "from the outside": appended("Float16OptimizerWithFloat16Params.sharded_state_dict = sharded_by_name"),
            "fp32 refused": (_CONVERTED, f"        assert not any(self.fp32_from_fp32_groups)\n{_CONVERTED}"),
        },
        tree=megatron,
    ),
    "padded slices": Otherwise(
        fully_reshardable_padding,
        fully_reshardable_padding.TARGET.module,
        edits={
            "the gathered state keeps its padding": ("offset_in_world_tensors += gbuf_world_numel_unpadded\n\n                # Collect", "offset_in_world_tensors += gbuf_world_numel\n\n                # Collect"),
            "an index map of its own": (") in buffer.param_index_map.items():\n                    try:", ") in compact_index_map(buffer).items():\n                    try:"),
            "the range is moved": ("                    tensors = {}\n                    for state_key", "                    param_world_start, param_world_end = moved(buffer, model_param)\n                    tensors = {}\n                    for state_key"),
            "cut by a helper": ("state_ten = world_tensors[state_key][param_world_start:param_world_end]", "state_ten = cut(world_tensors[state_key], buffer, model_param)"),
            "refused where there is padding": ("        prefix = 'optimizer.state'\n        model_space_state", "        self.refuse_padding()\n        prefix = 'optimizer.state'\n        model_space_state"),
            "loaded as it was written": ("                    src_tensors = {}\n                    for k, v in state_dict[param_idx]", "                    src_tensors = {}\n                    for k, v in moved_back(state_dict)[param_idx]"),
            "from the outside": appended("DistributedOptimizer.sharded_param_state_fully_reshardable = by_parameter"),
            "no bucket has padding": (_GRAD_BUFFERS, "numel_unpadded=per_bucket_numel_unpadded[bucket_id]", "numel_unpadded=bucket_end_index - bucket_start_index"),
        },
        said={"no bucket has padding": (Verdict.BROKEN, "the seam takes away what buckets say that they lack, which is nothing")},
        tree=megatron,
    ),
    "quantized": Otherwise(
        fp8_quantized_unwrap,
        fp8_quantized_unwrap.TARGET.module,
        edits={
            "asked for the method": (_NO_KERNEL, "    query = query.dequantize() if hasattr(query, 'dequantize') else query\n    key = key.dequantize() if hasattr(key, 'dequantize') else key\n" + _NO_KERNEL),
            "a guard that asks for the type": ("tensor.dtype == torch.bfloat16", "type(tensor) is torch.Tensor and tensor.dtype == torch.bfloat16"),
            "a guard of its own": ("    if not _all_bfloat16(query, key):\n", "    if not _are_plain(query, key):\n"),
            "copied": ("    query_bshd = query.permute(1, 0, 2, 3).contiguous()\n", "    query_bshd = torch.empty(query.shape, dtype=query.dtype, device=query.device)\n    query_bshd.copy_(query)\n    query_bshd = query_bshd.permute(1, 0, 2, 3).contiguous()\n"),
            "in the kernel": (fp8_quantized_unwrap.KERNEL_MODULE, "class SparseMLA(", "from transformer_engine.pytorch import QuantizedTensor\n\n\nclass SparseMLA("),
            "by the caller of the kernel": ("    out, _ = SparseMLA.apply(query_bshd, key_bshd, indices_bsgk, softmax_scale)\n", "    out, _ = SparseMLA.apply(plain(query_bshd), plain(key_bshd), indices_bsgk, softmax_scale)\n"),
        },
        tree=megatron,
    ),
    "packed lengths": Otherwise(
        gdn_capture_gates,
        gdn_capture_gates.COMMON.module,
        edits={
            "only outside of a capture": (_TOTAL, f"        if torch.cuda.is_current_stream_capturing():\n            return cu_seqlens\n{_TOTAL}"),
            "kept on the host": ("cu_seqlens[-1].cpu().item()", "self._lengths_on_the_host(cu_seqlens)[-1]"),
            "asserted on the device": ("        if (seq_lengths % cp_size != 0).any():\n", "        torch._assert_async((seq_lengths % cp_size == 0).all())\n        if False:\n"),
            "one tensor for both": (_GDN, "assert torch.equal(cu_seqlens_q, cu_seqlens_kv)", "assert cu_seqlens_q is cu_seqlens_kv"),
            "compared when it is warm": (_GDN, "assert torch.equal(cu_seqlens_q, cu_seqlens_kv)", "assert torch.cuda.is_current_stream_capturing() or torch.equal(cu_seqlens_q, cu_seqlens_kv)"),
            "resolved by the parameters": (_GDN, "            cu_seqlens_kv = self._resolve_cu_seqlens(\n", "            cu_seqlens_kv = packed_seq_params.resolved(\n"),
        },
        probe="probe_common",
        tree=megatron,
    ),
    "dispatch": Otherwise(
        hopper_flce_dispatch,
        hopper_flce_dispatch.TARGET.module,
        edits={
            "an entry for any other": (_REFUSAL, "            from megatron.core.fusions.linear_cross_entropy.portable import entry\n\n            self.forward_func, self.backward_func = entry.forward, entry.backward\n"),
            "a table": ("if capability[0] == 10:", "if capability[0] in SUPPORTED:"),
            "from Ampere on": ("if capability[0] == 10:", "if capability[0] >= 8:"),
            "another platform": ("    return Platform()\n", "    return Platform() if torch.cuda.get_device_capability()[0] == 10 else Portable()\n"),
            "not fused": ("    return LinearCrossEntropy.apply(", "    if torch.cuda.get_device_capability()[0] != 10:\n        return not_fused(hidden, weight, labels, reduction, ignore_index)\n    return LinearCrossEntropy.apply("),
            "made by the caller": ("        if hasattr(self, \"forward_func\"):\n", "        if registered():\n            self.forward_func, self.backward_func = registered()\n        if hasattr(self, \"forward_func\"):\n"),
        },
        tree=stand_in("dev-linear-cross-entropy"),
    ),
    "hybrid model": Otherwise(
        hybrid_linear_ce,
        hybrid_linear_ce.TARGET.module,
        edits={
            "a factory": ("self.output_layer = tensor_parallel.ColumnParallelLinear(\n", "self.output_layer = output_layer_for(config)(\n"),
            "another constructor": ("        super().__init__(config, pg_collection)\n", "        super().__init__(config, pg_collection)\n        if config.cross_entropy_fusion_impl == 'linear':\n            return build_fused(self)\n"),
            "another forward": ("        if decoder_input is None and self.pre_process:\n", "        if self.config.cross_entropy_fusion_impl == 'linear':\n            return fused_forward(self.output_layer, self.decoder, input_ids, labels)\n        if decoder_input is None and self.pre_process:\n"),
            "a way out at the end": ("        logits = self._scale_logits(logits)\n", "        if self.fused:\n            return logits\n        logits = self._scale_logits(logits)\n"),
            "a loss of its own": ("    def forward(\n", "    def compute_language_model_loss(self, labels, logits):\n        return fused_loss(self.output_layer, labels, logits)\n\n    def forward(\n"),
            "the loss knows it": (_LANGUAGE, "    def compute_language_model_loss(self, labels, logits):\n", "    def compute_language_model_loss(self, labels, logits):\n        if self.config.cross_entropy_fusion_impl == 'linear':\n            return unfused(labels, logits)\n"),
            "refused": ("        super().__init__(config, pg_collection)\n", "        super().__init__(config, pg_collection)\n        assert config.cross_entropy_fusion_impl != 'linear'\n"),
        },
        tree=stand_in("dev-linear-cross-entropy"),
    ),
    "liger": Otherwise(
        liger_flce_none_backward,
        liger_flce_none_backward.MODULE,
        edits={
            "refused": ("    # If cross entropy is the last layer", "    assert grad_output.ndim == 0\n    # If cross entropy is the last layer"),
            "row by row": ("            grad_input.stride(-2),\n            grad_output,\n", "            grad_input.stride(-2),\n            grad_output.contiguous(),\n"),
            "recomputed": ("    # If cross entropy is the last layer", "    if grad_output.ndim == 1:\n        return recomputed(grad_output, grad_input, grad_weight, grad_bias)\n    # If cross entropy is the last layer"),
            "a sum for none": ('    if reduction == "none":\n        # Return per-token losses\n        loss = loss_1d\n', '    if reduction == "none":\n        # Return per-token losses\n        loss = Deferred.apply(loss_1d)\n'),
            "another kernel": ("        element_mul_kernel[(n_rows,)](\n            grad_input,\n", "        element_mul_by_row_kernel[(n_rows,)](\n            grad_input,\n"),
            "without fusion": appended("LigerFusedLinearCrossEntropyFunction = NotFused"),
        },
        tree=lambda: archive("liger_kernel-0.8.1"),
    ),
    "labelled tokens": Otherwise(
        liger_flce_labelled,
        liger_flce_labelled.TARGET.module,
        edits={
            "selected": ("    BT, H = _input.shape\n", "    _input = _input[target != ignore_index]\n    BT, H = _input.shape\n"),
            "by a helper": ("    BT, H = _input.shape\n", "    _input, target = labelled(_input, target, ignore_index)\n    BT, H = _input.shape\n"),
            "chunks without labels left out": ("        target_chunk = target[start_idx:end_idx]  # chunk_size,\n", "        target_chunk = target[start_idx:end_idx]  # chunk_size,\n        if not target_mask[start_idx:end_idx].any():\n            continue\n"),
            "by the caller": ("        needs_grad = _input.requires_grad", "        _input, target = of_labels(_input, target)\n        needs_grad = _input.requires_grad"),
            "a product of some rows": ("torch.mm(_input_chunk, weight.t(), out=logits_chunk)", "mm_of_rows(_input_chunk, weight, target_mask, out=logits_chunk)"),
            "another function": appended("fused_linear_cross_entropy_forward = of_labelled_tokens"),
        },
        tree=lambda: archive("liger_kernel-0.8.5"),
    ),
    "heads on frozen states": Otherwise(
        liger_flce_frozen_states,
        liger_flce_frozen_states.FUNCTION.module,
        edits={
            "handed over as learning": ("    apply_args = (\n        input,\n", "    input = as_learning(input, weight, bias)\n    apply_args = (\n        input,\n"),
            "by the weights": (liger_flce_none_backward.MODULE, "    input_requires_grad = _input.requires_grad if compute_gradients is None else compute_gradients\n", "    input_requires_grad = (_input.requires_grad or weight.requires_grad) if compute_gradients is None else compute_gradients\n"),
            "by the context": (liger_flce_none_backward.MODULE, "                compute_gradients=False if ctx.defer_grads else None,\n", "                compute_gradients=False if ctx.defer_grads else any(ctx.needs_input_grad),\n"),
            "by a helper": (liger_flce_none_backward.MODULE, "    input_requires_grad = _input.requires_grad if compute_gradients is None else compute_gradients\n", "    input_requires_grad = learns(_input, weight, bias, compute_gradients)\n"),
            "another function": appended("liger_fused_linear_cross_entropy = of_any_states(liger_fused_linear_cross_entropy)"),
        },
        tree=lambda: archive("liger_kernel-0.8.5"),
    ),
    "strided gradients": Otherwise(
        liger_flce_strided_gradients,
        liger_flce_strided_gradients.TARGET.module,
        edits={
            "in rows before": ("        BT, H = grad_input.shape\n", "        grad_input = grad_input.contiguous()\n        grad_weight = in_rows(grad_weight)\n        BT, H = grad_input.shape\n"),
            "made in rows": ("            grad_weight = torch.zeros_like(weight, device=device) if weight_needs_grad else None\n", "            grad_weight = torch.zeros(weight.shape, dtype=weight.dtype, device=device) if weight_needs_grad else None\n"),
            "states in rows": ("    grad_input = torch.zeros_like(_input, device=device)\n", "    grad_input = torch.zeros(_input.shape, dtype=_input.dtype, device=device)\n"),
            "by the kernel": ("liger_kernel.ops.utils", "    X_ptr += program_id * X_stride\n", "    X_ptr += program_id * row_stride(X_stride, X_ptr)\n"),
            "by PyTorch": ("        if grad_weight is not None:\n            V, H = grad_weight.shape\n", "        if grad_weight is not None and grad_weight.stride(-1) != 1:\n            grad_weight = grad_weight * grad_output\n        elif grad_weight is not None:\n            V, H = grad_weight.shape\n"),
            "from the outside": appended("fused_linear_cross_entropy_backward = in_rows(fused_linear_cross_entropy_backward)"),
        },
        tree=lambda: archive("liger_kernel-0.8.4"),
    ),
    "gradients that are added": Otherwise(
        fsdp_fused_accumulation,
        fsdp_fused_accumulation.TARGET.module,
        edits={
            "by strategy": ("            param.overwrite_main_grad = True\n", "            param.overwrite_main_grad = self.data_parallel_sharding_strategy != 'optim'\n"),
            "by a helper": ("            param.overwrite_main_grad = True\n", "            param.overwrite_main_grad = self.writes_over()\n"),
            "in the first microbatch": ("            param.overwrite_main_grad = True\n", "            param.overwrite_main_grad = self.microbatch_count == 0\n"),
            "not at all": ("            param.overwrite_main_grad = True\n", "            pass\n"),
            "before": ("        for param in params:\n            # This setting is needed to make FSDP store", "        params = told_what_to_do(params)\n        for param in params:\n            # This setting is needed to make FSDP store"),
            "from the outside": appended("MegatronFSDP.all_gather_and_wait_parameters_ready = adding(MegatronFSDP.all_gather_and_wait_parameters_ready)"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "main weights of FusedAdam": Otherwise(
        precision_aware_reload,
        precision_aware_reload.TARGET.module,
        edits={
            "where it returns": ("megatron.core.optimizer.distrib_optimizer", "        # When using precision-aware optimizer, main params are held by self.optimizer. It will also\n        # do the work of copying data from main params to model params.\n        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:\n            return\n\n        if state_dict is not None:\n", "        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:\n            return self.set_main_weights(state_dict)\n\n        if state_dict is not None:\n"),
            "by forgetting them": ("megatron.core.optimizer.distrib_optimizer", "        # When using precision-aware optimizer, main params are held by self.optimizer. It will also\n        # do the work of copying data from main params to model params.\n        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:\n            return\n\n        if state_dict is not None:\n", "        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:\n            self.optimizer.state.clear()\n            return\n\n        if state_dict is not None:\n"),
            "by the caller": ("            self._copy_model_params_to_main_params(state_dict=state_dict)\n", "            self._copy_model_params_to_main_params(state_dict=state_dict)\n            refresh_main_weights(self.optimizer)\n"),
            "before": ("        if self.param_groups:\n            self._copy_model_params_to_main_params(state_dict=state_dict)\n", "        if self.param_groups and not self.refreshed(state_dict):\n            self._copy_model_params_to_main_params(state_dict=state_dict)\n"),
            "main weights of its own": ("megatron.core.optimizer.distrib_optimizer", "                        # When using precision-aware optimizer, main params are held by FusedAdam.\n                        shard_main_param = None\n", "                        shard_main_param = shard_model_param.clone().float()\n"),
            "from the outside": appended("MixedPrecisionOptimizer.reload_model_params = refreshing(MixedPrecisionOptimizer.reload_model_params)"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "norms of GLM-4V": Otherwise(
        liger_glm4v_norms,
        liger_glm4v_norms.TARGET.module,
        edits={
            "passed": ("_patch_rms_norm_module(decoder_layer.post_self_attn_layernorm)\n                    _patch_rms_norm_module(decoder_layer.post_mlp_layernorm)\n", "_patch_rms_norm_module(decoder_layer.post_self_attn_layernorm, in_place=False)\n                    _patch_rms_norm_module(decoder_layer.post_mlp_layernorm, in_place=False)\n"),
            "by another default": ("def _patch_rms_norm_module(module, offset=0.0, eps=1e-6, casting_mode=\"llama\", in_place=True,", "def _patch_rms_norm_module(module, offset=0.0, eps=1e-6, casting_mode=\"llama\", in_place=False,"),
            "by the norm": ("        module.in_place = in_place\n        module.row_mode = row_mode\n        module.impl = None\n", "        module.in_place = in_place and not is_before_a_sum(module)\n        module.row_mode = row_mode\n        module.impl = None\n"),
            "by the pass": ("liger_kernel.ops.rms_norm", "    if in_place is True:\n", "    if in_place is True and not is_shared(dY):\n"),
            "from the outside": appended("apply_liger_kernel_to_glm4v = of_sums(apply_liger_kernel_to_glm4v)"),
        },
        tree=lambda: archive("liger_kernel-0.8.5"),
    ),
    "gradients that optimizers keep": Otherwise(
        fsdp_decoupled_grad_sums,
        fsdp_decoupled_grad_sums.TARGET.module,
        edits={
            "named": ("    return \"grad\"\n\n\ndef _unshard", "    return \"decoupled_grad\" if hasattr(param, \"decoupled_grad\") else \"grad\"\n\n\ndef _unshard"),
            "by another function": ("                    grad_attr = _get_main_grad_attr(param)\n                    grad = getattr(param, grad_attr)\n                    if grad is None:\n                        continue\n                    params_sum", "                    grad_attr = attribute_of(param, ddp_config)\n                    grad = getattr(param, grad_attr)\n                    if grad is None:\n                        continue\n                    params_sum"),
            "by a decorator": ("def _get_main_grad_attr(", "@of_fsdp\ndef _get_main_grad_attr("),
            "kept as usual, too": (fsdp_decoupled_grad_sums.BUFFERS, "                setattr(param, \"decoupled_grad\", grad)\n", "                setattr(param, \"decoupled_grad\", grad)\n                param.main_grad = grad\n"),
            "from the outside": appended("_get_main_grad_attr = of_fsdp(_get_main_grad_attr)"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "scaled gradients": Otherwise(
        fsdp2_per_token_loss,
        fsdp2_per_token_loss.TARGET.module,
        edits={
            "in the base class": ("megatron.core.distributed.data_parallel_base", "    def scale_gradients(self, scaling_factor: float) -> None:\n        \"\"\"Scale all gradients inside the buffers by `scaling_factor`.\"\"\"\n        pass\n", "    def scale_gradients(self, scaling_factor: float) -> None:\n        scale(self.module, scaling_factor)\n"),
            "in the wrapper": ("    def load_state_dict(self, state_dict, strict=True):\n", "    def scale_gradients(self, scaling_factor):\n        scale(self.module, scaling_factor)\n\n    def load_state_dict(self, state_dict, strict=True):\n"),
            "where it is asked": ("megatron.core.distributed.finalize_model_grads", "            model_chunk.scale_gradients(scaling)\n", "            scale(model_chunk, scaling)\n"),
            "another base": ("class TorchFullyShardedDataParallel(_BaseDataParallel):\n", "class TorchFullyShardedDataParallel(Scaling, _BaseDataParallel):\n"),
            "from the outside": appended("TorchFullyShardedDataParallel.scale_gradients = scale_gradients"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "scale of logits": Otherwise(
        mla_softmax_scale,
        mla_softmax_scale.ATTENTION,
        edits={
            "in the constructor": ("        self.softmax_scale = mscale * mscale / math.sqrt(self.q_head_dim)\n", "        self.softmax_scale = self.config.softmax_scale or mscale * mscale / math.sqrt(self.q_head_dim)\n"),
            "to the core alone": ("            softmax_scale=self.softmax_scale,\n", "            softmax_scale=scale_of(self.config, self.softmax_scale),\n"),
            "refused": (mla_softmax_scale.CONFIG, "        if self.attention_output_gate:\n            raise NotImplementedError(\"Output gate", "        if self.softmax_scale is not None:\n            raise ValueError(\"MLA has no softmax_scale\")\n        if self.attention_output_gate:\n            raise NotImplementedError(\"Output gate"),
            "where the core is built": (mla_softmax_scale.TARGET.module, "    if isinstance(spec_or_module, types.FunctionType):\n        return spec_or_module\n\n", "    if 'k_channels' in kwargs:\n        kwargs['softmax_scale'] = configured(kwargs)\n    if isinstance(spec_or_module, types.FunctionType):\n        return spec_or_module\n\n"),
            "another builder": ("from megatron.core.transformer.spec_utils import ModuleSpec, build_module\n", "from megatron.core.transformer.spec_utils import ModuleSpec\nfrom megatron.core.transformer.scaled import build_module\n"),
            "from the outside": appended("MultiLatentAttention.__init__ = scaled(MultiLatentAttention.__init__)"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "muon": Otherwise(
        muon_gated_fc1,
        muon_gated_fc1.TARGET.module,
        edits={
            "shapes of a gate": ("megatron.core.optimizer", "            # TODO(deyuf): support MLA\n", "            if 'linear_fc1.weight' in name:\n                param.is_qkv, param.qkv_split_shapes = True, halves(param)\n"),
            "at the step": ("        if self.split_qkv and self.is_qkv_fn(p):  # type: ignore[misc]\n", "        if getattr(p, 'partition_stride', 1) == 2:\n            grad = torch.cat([self.orthogonalize(alone(p), each) for each in grad.chunk(2)])\n        elif self.split_qkv and self.is_qkv_fn(p):  # type: ignore[misc]\n"),
            "another function asked": ("    kwargs[\"is_qkv_fn\"] = lambda p: getattr(p, \"is_qkv\", False)\n", "    kwargs[\"is_qkv_fn\"] = holds_matrices(model_chunks)\n"),
            "in the constructor": ("        self.is_qkv_fn = is_qkv_fn\n", "        self.is_qkv_fn = holds_matrices(params)\n"),
            "before it is made": ("    entry = _EMERGING_OPTIMIZERS[eopt_name]\n", "    mark_matrices(model_chunks)\n    entry = _EMERGING_OPTIMIZERS[eopt_name]\n"),
            "by the copied attributes": ("megatron.core.tensor_parallel.layers", "    \"qkv_split_shapes\": None,\n", "    \"qkv_split_shapes\": None,\n    \"gated_split_shapes\": None,\n"),
            "from the outside": appended("TensorParallelMuon.orthogonalize = in_halves(TensorParallelMuon.orthogonalize)"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "conversations": Otherwise(
        sft_end_of_turn_loss,
        sft_end_of_turn_loss.TARGET.module,
        edits={
            "another number": ("        pad = tokenizer.pad\n", "        pad = self._pad_token_id\n"),
            "by place": ("        loss_mask[labels == pad] = 0.0  # Mask paddings\n", "        loss_mask[padded_places(cu_seqlens)] = 0.0\n"),
            "ends kept": ("        loss_mask[labels == pad] = 0.0  # Mask paddings\n", "        loss_mask[(labels == pad) & (labels != eod)] = 0.0\n"),
            "by the base class": ("megatron.core.datasets.megatron_dataset", "        # Check if pad token id collides", "        self.config.tokenizer = told_apart(self.config.tokenizer)\n        # Check if pad token id collides"),
            "by a decorator": ("    def __getitem__(self, idx: int) -> Dict[str, Any]:\n\n        tokenizer", "    @padding_told_apart\n    def __getitem__(self, idx: int) -> Dict[str, Any]:\n\n        tokenizer"),
            "from the outside": appended("SFTDataset.__getitem__ = told_apart(SFTDataset.__getitem__)"),
        },
        tree=lambda: archive("megatron_core-0.19.2"),
    ),
    "the Trainer's losses": Otherwise(
        trainer_moe_aux_loss,
        trainer_moe_aux_loss.TARGET.module,
        edits={
            "in the loss": ("        return (loss, outputs) if return_outputs else loss\n\n    def compute_loss_context_manager", "        loss = self._without_excess(loss, outputs)\n        return (loss, outputs) if return_outputs else loss\n\n    def compute_loss_context_manager"),
            "over ranks": ("            loss *= loss_scale if self.args.n_gpu <= 1 else self.args.n_gpu\n", "            loss = scaled(loss, outputs, loss_scale if self.args.n_gpu <= 1 else self.args.n_gpu)\n"),
            "by the model": ("                kwargs[\"num_items_in_batch\"] = num_items_in_batch\n", "                kwargs[\"num_items_in_batch\"] = num_items_in_batch\n                kwargs[\"microbatches\"] = self.current_gradient_accumulation_steps\n"),
            "in the step": ("            if not loss_is_scaled_for_ga:\n", "            loss = self._with_balancing(loss)\n            if not loss_is_scaled_for_ga:\n"),
            "from the outside": appended("Trainer.compute_loss = balanced(Trainer.compute_loss)"),
        },
        tree=lambda: archive("transformers-5.24.0"),
    ),
    "attention of transformers": Otherwise(
        cudnn_sdpa_query_gradient,
        cudnn_sdpa_query_gradient.TARGET.module,
        edits={
            "without cuDNN": ("    attn_output = torch.nn.functional.scaled_dot_product_attention(\n", "    torch.backends.cuda.enable_cudnn_sdp(False)\n    attn_output = torch.nn.functional.scaled_dot_product_attention(\n"),
            "whole tiles of keys": ("    attn_output = torch.nn.functional.scaled_dot_product_attention(\n", "    key, value, attention_mask = in_whole_tiles(key, value, attention_mask)\n    attn_output = torch.nn.functional.scaled_dot_product_attention(\n"),
            "another function asked": ("    attn_output = torch.nn.functional.scaled_dot_product_attention(\n", "    attn_output = finite_attention(\n"),
            "logits moved": ("    kv_length = key.shape[2]\n", "    kv_length = key.shape[2]\n    key = key - key.mean(2, keepdim=True)\n"),
            "by a decorator": ("def sdpa_attention_forward(\n", "@without_cudnn\ndef sdpa_attention_forward(\n"),
            "for the whole process": appended("torch.backends.cuda.enable_cudnn_sdp(False)"),
            "from the outside": appended("sdpa_attention_forward = without_cudnn(sdpa_attention_forward)"),
        },
        said={"for the whole process": (Verdict.BROKEN, "the seam leaves every call alone where cuDNN is switched off")},
        tree=lambda: archive("transformers-5.24.0"),
    ),
    "states of fresh optimizers": Otherwise(
        dcp_fresh_optimizer_state,
        dcp_fresh_optimizer_state.TARGET.module,
        edits={
            "set back": ("    optim.zero_grad(set_to_none=True)\n", "    optim.zero_grad(set_to_none=True)\n    begin_anew(optim)\n"),
            "made without a step": ("    optim.step(closure=None)\n", "    make_states(optim)\n"),
            "set back by the caller": ("        _init_optim_state(optim)\n        osd = _state_dict_fn(optim", "        with fresh(optim):\n            _init_optim_state(optim)\n        osd = _state_dict_fn(optim"),
            "by a decorator": ("def _init_optim_state(", "@begins_anew\ndef _init_optim_state("),
            "from the outside": appended("_init_optim_state = begins_anew(_init_optim_state)"),
        },
        tree=lambda: archive("torch-2.15.0"),
    ),
    "states of frozen parameters": Otherwise(
        dcp_frozen_optimizer_state,
        dcp_frozen_optimizer_state.TARGET.module,
        edits={
            "nested": ("                if param.requires_grad:\n                    if fqn in cast(", "                if param.requires_grad or fqn in optim_state_dict[_STATE]:\n                    if fqn in cast("),
            "flat": ("                if not param.requires_grad:\n                    continue\n\n                # Reconstruct", "                if not has_state(fqn, state_dict):\n                    continue\n\n                # Reconstruct"),
            "made for all": ("            if param.requires_grad:\n                param.grad = torch.zeros_like(param)\n", "            param.grad = torch.zeros_like(param)\n"),
            "added by the caller": ("        else:\n            optim_state_dict = {}\n        if info.fsdp_modules:", "            optim_state_dict.update(of_frozen(optim, state_dict))\n        else:\n            optim_state_dict = {}\n        if info.fsdp_modules:"),
            "from the outside": appended("_split_optim_state_dict = with_frozen(_split_optim_state_dict)"),
        },
        tree=lambda: archive("torch-2.15.0"),
    ),
    "parallel losses": Otherwise(
        loss_parallel_log_softmax,
        loss_parallel_log_softmax.TARGET.module,
        edits={
            "computed": ("    return grad_output.to(input_dtype)\n", "    return through_log_softmax(grad_output, args).to(input_dtype)\n"),
            "in two passes": ("    return (grad_input + torch.exp(x)) * grad_output\n", "    return grad_input * grad_output\n"),
            "another pass in the table": ("    aten._log_softmax_backward_data.default: _log_softmax_backward_handler,\n", "    aten._log_softmax_backward_data.default: _jacobian_handler,\n"),
            "none in the table": ("    aten._log_softmax_backward_data.default: _log_softmax_backward_handler,\n", ""),
            "when it is enabled": ("_custom_op_handlers.update(customized_loss_ops)\n", "_custom_op_handlers.update({**customized_loss_ops, **OF_LOG_SOFTMAX})\n"),
            "from the outside": appended("_log_softmax_backward_handler = through(_log_softmax_backward_handler)"),
        },
        tree=lambda: archive("torch-2.15.0"),
    ),
    "saved values": Otherwise(
        compile_budget_dropout,
        compile_budget_dropout.TARGET.module,
        edits={
            "random ones at zero": ("        return node_info.inputs\n\n    runtime", "        return node_info.inputs + random_nodes(node_info)\n\n    runtime"),
            "never taken back": ("                i.dist_from_bw < int(1e9)  # type", "                not draws(i)\n                and i.dist_from_bw < int(1e9)  # type"),
            "by the budget": ("    memory_budget = config.activation_memory_budget\n", "    memory_budget = 1 if draws_numbers(joint_module) else config.activation_memory_budget\n"),
            "by a decorator": ("def choose_saved_values_set(", "@with_random_nodes\ndef choose_saved_values_set("),
            "from the outside": appended("choose_saved_values_set = with_random_nodes(choose_saved_values_set)"),
        },
        tree=lambda: archive("torch-2.11.0"),
    ),
    "cached graphs": Otherwise(
        compile_budget_dropout,
        compile_budget_dropout.CACHE.module,
        edits={
            "a key of its own": ('        key = "a" + pickler.get_hash(details)\n', '        key = "b" + pickler.get_hash(details)\n'),
            "by a decorator": ("def autograd_cache_key(", "@by_what_is_kept\ndef autograd_cache_key("),
            "cut with random ones": (compile_budget_dropout.TARGET.module, "        return node_info.inputs\n\n    runtime", "        return node_info.inputs + random_nodes(node_info)\n\n    runtime"),
            "from the outside": appended("autograd_cache_key = by_what_is_kept(autograd_cache_key)"),
        },
        probe="probe_cache",
        tree=lambda: archive("torch-2.11.0"),
    ),
    "second results": Otherwise(
        mix_order_reduction_views,
        mix_order_reduction_views.TARGET.module,
        edits={
            "copied to their place": (_SIMD, '            final_reduce = f"{buffer_name} = {ws_name}', '            final_reduce = f"{buffer_name}[:] = {ws_name}'),
            "not fused": ("        if not config.triton.mix_order_reduction:\n", "        if not config.triton.mix_order_reduction or writes_parts(node1, node2):\n"),
            "never added": ("        if not self.scheduler.can_fuse(node1, node2, allow_mix_order_reduction=False):\n", "        if writes_parts(node2) or not self.scheduler.can_fuse(node1, node2, allow_mix_order_reduction=False):\n"),
            "by a helper": (_SIMD, "            V.graph.wrapper_code.writeline(final_reduce)\n", "            write_to_its_place(buffer_name, final_reduce)\n"),
            "from the outside": appended("MixOrderReduction.can_fuse = classmethod(of_whole_tensors(MixOrderReduction.can_fuse))"),
        },
        tree=lambda: archive("torch-2.11.0"),
    ),
    "keys of compiled graphs": Otherwise(
        mix_order_reduction_views,
        mix_order_reduction_views.CACHE.module,
        edits={
            "another prefix": ('    key = "f" + pickler.get_hash(details)\n', '    key = "g" + pickler.get_hash(details)\n'),
            "copied to their place": (_SIMD, '            final_reduce = f"{buffer_name} = {ws_name}', '            final_reduce = f"{buffer_name}[:] = {ws_name}'),
            "by a helper": ("            return self._stream.getvalue()\n", "            return by_fusions(self._stream.getvalue())\n"),
            "from the outside": appended("FxGraphCachePickler.dumps = by_fusions(FxGraphCachePickler.dumps)"),
        },
        probe="probe_cache",
        tree=lambda: archive("torch-2.11.0"),
    ),
    "groups": Otherwise(
        mamba3_mimo_gqa_backward,
        mamba3_mimo_gqa_backward.PLAIN.module,
        edits={
            "sums in torch": (_REFUSED_G, "        dq_tilelang = dq_tilelang.view(B, S, R, G, H // G, N).sum(4)\n        dk_tilelang = dk_tilelang.view(B, S, R, G, H // G, N).sum(4)\n"),
            "one branch for all": ("    if G == 1:\n", "    if H % G == 0:\n        dq_tilelang, dk_tilelang = sums_of_groups(dq_tilelang, dk_tilelang, G)\n    elif G == 1:\n"),
            "expanded by the caller": ("    bwd_fwd_kernel = mamba_mimo_bwd_fwd(\n", "    if 1 < G < H:\n        return expanded(q, k)\n    bwd_fwd_kernel = mamba_mimo_bwd_fwd(\n"),
            "atomic sums": ("            dk_tilelang.view(B, S*R, H, N), \n", "            dk_tilelang.view(B, S*R, G, N), \n"),
            "a class that wraps it": appended("mamba_mimo_bwd_combined = of_any_groups(mamba_mimo_bwd_combined)"),
        },
        probe="probe_plain",
        tree=lambda: archive("mamba_ssm-2.3.2.post1"),
    ),
    "layout": Otherwise(
        mamba3_mimo_reduce_layout,
        _MIMO,
        edits={
            "summed in shared memory": ("T.reduce_sum(dZetaZ_frag", "sum_in_shared(dZetaZ_frag"),
            "another layout": ("def mamba_mimo_bwd_bwd(\n", "@in_layout(reducible)\ndef mamba_mimo_bwd_bwd(\n"),
            "another kernel": ("    bwd_bwd_kernel = mamba_mimo_bwd_bwd(\n", "    bwd_bwd_kernel = mamba_mimo_bwd_in_triton(\n"),
            "a warning": (f"tilelang:{REDUCE}", "  ICHECK(analyzer->CanProveEqual(projected_index, simplified_index))\n", "  if (!analyzer->CanProveEqual(projected_index, simplified_index))\n    LOG(WARNING)\n"),
            "proved": (f"tilelang:{REDUCE}", "  PrimExpr simplified_index = analyzer->Simplify(index_expr);\n", "  PrimExpr simplified_index = analyzer->Simplify(Projected(index_expr, reduce_var, steps));\n"),
        },
        tree=lambda: parsed_once(tree_of("edge").root),
    ),
    "offsets of a scan": Otherwise(
        mamba2_int32_offsets,
        mamba2_int32_offsets.SCAN.module,
        edits={
            "contiguous": ("    dA_cumsum, dt = _chunk_cumsum_fwd(dt, A, chunk_size", "    dt = dt.contiguous()\n    dA_cumsum, dt = _chunk_cumsum_fwd(dt, A, chunk_size"),
            "refused": ("    batch, seqlen, nheads, headdim = x.shape\n    _, _, ngroups, dstate = B.shape\n", "    batch, seqlen, nheads, headdim = x.shape\n    assert seqlen * dt.stride(1) < 2**31\n    _, _, ngroups, dstate = B.shape\n"),
            "in pieces": appended("_mamba_chunk_scan_combined_fwd = in_pieces(_mamba_chunk_scan_combined_fwd)"),
            "wide strides": ("            x.stride(0), x.stride(1), x.stride(2), x.stride(3),\n", "            *wide(x.stride()),\n"),
            "a kernel for long rows": (f"{mamba2_int32_offsets.SCAN.module[:-8]}chunk_state", "        _chunk_cumsum_fwd_kernel[grid_chunk_cs](", "        kernel_for(dt)[grid_chunk_cs]("),
        },
        probe="probe_scan",
        tree=lambda: archive("mamba_ssm-2.3.2.post1"),
    ),
    "offsets of a norm": Otherwise(
        mamba2_int32_offsets,
        mamba2_int32_offsets.NORM.module,
        edits={
            "contiguous": ("    M, N = x.shape\n", "    M, N = x.shape\n    z = None if z is None else z.contiguous()\n"),
            "a pointer that moves": ("    X += row * stride_x_row + group * N\n", "    X = moved(X, row, stride_x_row, group * N)\n"),
            "in torch": appended("_layer_norm_fwd = rms_norm_in_torch"),
            "a stride of 64 bits": ("    stride_z_row,\n", "    stride_z_row: 'i64',\n"),
        },
        probe="probe_norm",
        tree=lambda: archive("mamba_ssm-2.3.2.post1"),
    ),
    "stages": Otherwise(
        mamba3_siso_pipelining,
        mamba3_siso_pipelining.TARGET.module,
        edits={
            "one for all": (_CONFIGS, "        for s in [1]\n"),
            "by the device": (_CONFIGS, "        for s in stages_of_this_device()\n"),
            "pruned elsewhere": ("    key=[\n", "    prune_configs_by={'early_config_prune': one_stage_on_blackwell},\n    key=[\n"),
            "set later": appended("mamba3_siso_fwd_kernel.configs = one_stage_on_blackwell(mamba3_siso_fwd_kernel.configs)"),
            "loops of one stage": ("    for chunk_idx in range(", "    for chunk_idx in tl.range(num_stages=1, *"),
            "another kernel": appended("mamba3_siso_fwd_kernel = for_this_device(mamba3_siso_fwd_kernel)"),
        },
        tree=lambda: archive("mamba_ssm-2.3.2.post1"),
    ),
    "asked": Otherwise(
        megatron_cuda_on_import,
        megatron_cuda_on_import.TARGET.module,
        texts=lambda: {megatron_cuda_on_import.TARGET.module: "import torch\n\nfrom elsewhere import ask_nvml, in_a_child\n\nIS_HOPPER = torch.cuda.get_device_capability(0)[0] >= 9\n"},
        edits={
            "when it is used": ("IS_HOPPER = torch.cuda.get_device_capability(0)[0] >= 9\n", "def __getattr__(name):\n    return torch.cuda.get_device_capability(0)[0] >= 9\n"),
            "of the driver": ("torch.cuda.get_device_capability(0)", "ask_nvml('compute_capability', 0)"),
            "in a child": ("torch.cuda.get_device_capability(0)[0] >= 9", "in_a_child('torch.cuda.get_device_capability(0)[0] >= 9')"),
            "where it is initialised": ("IS_HOPPER = torch", "IS_HOPPER = torch.cuda.is_initialized() and torch"),
            "a function": ("IS_HOPPER = torch.cuda.get_device_capability(0)[0] >= 9\n", "def is_hopper():\n    return torch.cuda.get_device_capability(0)[0] >= 9\n"),
        },
    ),
    "axes": Otherwise(
        tilelang_bulk_copy_rank,
        f"tilelang:{OLD_COPY}",
        texts=lambda: {tilelang_bulk_copy_rank.TARGET.module: switched_on("mamba3-pinned")},
        edits={
            "made flat": (_TWO, "if (shared_layout->InputDim() != 2) shared_layout = Flattened(shared_layout);"),
            "any number": (_TWO, 'ICHECK(shared_layout->InputDim() <= 5) << "Cannot detect TMA layout.";'),
            "a plain copy": (_TWO, f"if (shared_layout->InputDim() != 2) return LowerNormalCopy(T, analyzer);\n    {_TWO}"),
            "chosen before": ("Stmt CopyNode::LowerBulkCopy(", "static bool as_plain_copies = LetThreeAxesBePlainCopies();\nStmt CopyNode::LowerBulkCopy("),
            "flat in the kernel": (tilelang_bulk_copy_rank.TARGET.module, "T.alloc_shared([chunk_size, R, R], dtype)", "T.alloc_shared([chunk_size * R, R], dtype)"),
        },
        tree=lambda: parsed_once(tree_of("mamba3-pinned").root),
    ),
    "grouped sums": Otherwise(
        tilelang_grouped_reduce,
        f"tilelang:{OLD_REDUCE}",
        edits={
            "divided": ("        int reducing_threads = (*extent) * (*scale);\n", "        int reducing_threads = (*extent) * (*scale) / TimesCounted(iter_split);\n"),
            "refused": ("        int reducing_threads = (*extent) * (*scale);\n", "        int reducing_threads = (*extent) * (*scale);\n        ICHECK(IsPowerOfTwo(reducing_threads));\n"),
            "in shared memory": ("  auto src_scope = this->src.scope();\n", "  if (!IsAligned(this->src)) return LowerThroughShared(T, analyzer);\n  auto src_scope = this->src.scope();\n"),
            "another layout": ("          ->BindThreadRange(src_layout->ThreadRange());\n  return reducer_layout;", "          ->BindThreadRange(src_layout->ThreadRange());\n  return AlignedToGroups(reducer_layout);"),
        },
        tree=lambda: archive("tilelang-0.1.9-"),
    ),
    "register operands": Otherwise(
        triton_register_operands,
        triton_register_operands.TARGET.module,
        edits={
            "not pipelined": ("add_pipeline(pm, opt.num_stages, dump_enabled)", "add_pipeline(pm, 1 if capability // 10 == 9 else opt.num_stages, dump_enabled)"),
            "through shared memory": ("add_optimize_dot_operands(pm, capability >= 80)", "add_optimize_dot_operands(pm, capability // 10 == 8)"),
            "four warps": ('add_convert_to_ttgpuir(pm, f"cuda:{capability}", opt.num_warps,', 'add_convert_to_ttgpuir(pm, f"cuda:{capability}", min(opt.num_warps, 4),'),
            "waits in PTX": ("            print(ret)\n        return ret", "            print(ret)\n        return wait_for_all_products(ret)"),
            "another compiler": ("from triton._C.libtriton import", "from our_triton.libtriton import"),
        },
        tree=lambda: parsed_once(tree_of("newest").root),
    ),
    "extents": Otherwise(
        tilelang_zero_extent_iterator,
        f"tilelang:{UTILS}",
        edits={
            "not less": ("analyzer->CanProveEqual(expected_lower_factor, mark->extent);", "analyzer->CanProve(expected_lower_factor >= mark->extent);"),
            "one at least": ("analyzer->Simplify(FloorDiv(mark->extent, expected_lower_factor)), 1);", "analyzer->Simplify(max(1, FloorDiv(mark->extent, expected_lower_factor))), 1);"),
            "refused": (_FULL, f"  ICHECK(!analyzer->CanProve(expected_lower_factor > mark->extent));\n{_FULL}"),
            "left out": ("  if (!match_full_iter) {", "  if (!match_full_iter && !is_zero(analyzer->Simplify(FloorDiv(mark->extent, expected_lower_factor)))) {"),
            "dropped by the caller": ("    auto complement_splits = get_unused_iters(mark, existing_splits, analyzer);", "    auto complement_splits = WithoutZeroExtent(get_unused_iters(mark, existing_splits, analyzer));"),
        },
        tree=lambda: parsed_once(tree_of("mamba3-pinned").root),
    ),
}  # fmt: skip
