"""Megatron-LM's own unit tests that are run under overlays, in groups: those of code that overlays replace."""

from __future__ import annotations

from dataclasses import dataclass

FOLDER = "tests/unit_tests"


@dataclass(frozen=True)
class Group:
    """Tests that run in one process."""

    id: str
    title: str
    files: tuple[str, ...]
    """In `FOLDER`: files, and folders of which every file counts."""
    of: tuple[str, ...]
    """The overlays whose targets these are tests of."""
    but: tuple[str, ...] = ()
    """Tests that are not run, which `LEFT_OUT` explains."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the files as a process names them that runs in the checkout."""
        return tuple(f"{FOLDER}/{each}" for each in self.files)


GROUPS = (
    Group(
        "attention",
        "sparse and latent attention",
        (
            "transformer/experimental_attention_variant",
            "transformer/test_multi_latent_attention.py",
            "models/test_experimental_attention_variant_module_specs.py",
            "models/test_dsa_gpt_mamba_equivalence.py",
            "fusions/test_mla_yarn_rope_apply.py",
        ),
        (
            "dsa-branchless-scatter",
            "dsa-capture-gates",
            "dsa-indexer-streaming",
            "dsa-sparse-attention",
            "mla-rope-head-blocks",
            "mla-rope-key-gradient",
            "sparse-mla-dimensions",
            "tp-attention-sinks",
        ),
    ),
    Group(
        "ssm",
        "state spaces: Mamba and gated delta nets",
        (
            "ssm/ops",
            "ssm/test_causal_conv1d_triton.py",
            "ssm/test_gated_delta_net.py",
            "ssm/test_mamba_context_parallel.py",
            "ssm/test_mamba_layer.py",
            "ssm/test_mamba_mixer.py",
            "ssm/test_mlp_layer.py",
            "ssm/test_split_tensor_factory.py",
        ),
        ("float16-mixer-parameters", "gdn-capture-gates", "mamba-packed-seq-idx"),
    ),
    Group(
        "hybrid",
        "hybrid models",
        (
            "ssm/test_hybrid_block.py",
            "ssm/test_hybrid_layer_allocation.py",
            "models/test_hybrid_model.py",
            "models/test_hybrid_moe_model.py",
        ),
        ("hybrid-linear-ce", "hybrid-mtp-aux-loss"),
    ),
    Group(
        "module",
        "modules, layers and whole models",
        (
            "transformer/test_module.py",
            "transformer/test_transformer_layer.py",
            "transformer/test_transformer_block.py",
            "transformer/test_submodule_callables.py",
            "transformer/test_cuda_graphs.py",
            "models/test_gpt_model.py",
            "test_fp8_utils.py",
        ),
        (
            "explicit-tp-groups",
            "float16-fp32-exemption",
            "fp8-quantized-unwrap",
            "graph-hidden-recompute-grads",
            "quant-recipe-stale-weights",
            "residual-norm-recompute-alias",
        ),
    ),
    Group(
        "mtp",
        "multi-token prediction",
        ("transformer/test_multi_token_prediction.py", "pipeline_parallel/test_mtp_loss_scale.py"),
        ("cp-local-loss-mean", "mtp-roll-padded-boundaries", "mtp-token-counts-local", "mtp-z-loss"),
    ),
    Group(
        "routers",
        "routers of experts, and their losses",
        (
            "transformer/moe/test_aux_loss.py",
            "transformer/moe/test_qb_routing.py",
            "transformer/moe/test_router_replay.py",
            "transformer/moe/test_router_trace.py",
            "transformer/moe/test_routers.py",
        ),
        ("expert-bias-padding-mask", "masked-aux-loss-tokens", "seq-aux-loss-packed"),
    ),
    Group(
        "experts",
        "layers of experts",
        ("transformer/moe/test_latent_moe_layer.py", "transformer/moe/test_moe_layer.py"),
        ("latent-moe-fc2-init",),
    ),
    Group(
        "parallel",
        "tensor and pipeline parallelism",
        ("tensor_parallel", "pipeline_parallel/test_schedules.py", "distributed/test_finalize_model_grads.py"),
        ("gathered-logits-loss", "pipeline-padding-mask", "tp-label-smoothing", "tp-norm-gradients"),
    ),
    Group(
        "optimizers",
        "optimizers and sharded weights",
        (
            "optimizer",
            "test_optimizer.py",
            "distributed/test_distributed_data_parallel.py",
            "distributed/test_param_and_grad_buffer.py",
            "distributed/test_param_layout.py",
            "distributed/mfsdp_v1/test_mfsdp_fully_shard.py",
        ),
        (
            "float16-distributed-order",
            "float16-optimizer-state-ids",
            "fsdp-optimizer-under-update",
        ),
    ),
    Group(
        "checkpoints",
        "distributed checkpoints",
        ("dist_checkpointing",),
        ("fully-reshardable-padding",),
        ("dist_checkpointing/models/test_mlp_glu.py::TestParallelMLPWithGLU::test_oom_is_handled",),
    ),
)
LEFT_OUT = "it fills the memory of its host on purpose"
UNTESTED = {
    "cpu-offload-reload": "newer than the kept runs; Megatron's tests of offloading ask for a GPU",
    "expert-grad-norm": "newer than the kept runs; Megatron's tests of optimizers ask for a GPU",
    "fsdp-lone-rank-gradients": "newer than the kept runs; Megatron's tests of Megatron-FSDP ask for a GPU",
    "sft-end-of-turn-loss": "newer than the kept runs",
    "fsdp2-per-token-loss": "newer than the kept runs; Megatron's tests of Torch FSDP2 ask for a GPU",
    "fsdp-decoupled-grad-sums": "newer than the kept runs; Megatron's tests of Megatron-FSDP ask for a GPU",
    "fsdp-fused-accumulation": "newer than the kept runs; Megatron's tests of Megatron-FSDP ask for a GPU",
    "precision-aware-reload": "newer than the kept runs; Megatron's tests of precision-aware optimizers ask for a GPU",
    "fsdp-reduced-twice": "newer than the kept runs; Megatron's tests of Megatron-FSDP ask for a GPU",
    "expert-rng-resume": "newer than the kept runs; Megatron's tests of a launcher's checkpoints ask for a GPU",
    "global-aux-loss-scale": "newer than the kept runs; Megatron's tests of routers ask for a GPU",
    "hopper-flce-dispatch": "Megatron has no unit test of the fused linear cross entropy",
    "megatron-cuda-on-import": "a process that imports tests has asked for CUDA",
    "expert-gradient-groups": "newer than the kept runs; right in the release whose tests they ran",
    "mla-softmax-scale": "newer than the kept runs; Megatron's tests of multi-latent attention ask for a GPU",
    "muon-gated-fc1": "newer than the kept runs; Megatron's tests of Muon ask for a GPU",
    "layerwise-norm-groups": "newer than the kept runs; Megatron's tests of layer-wise optimizers ask for a GPU",
    "loss-mask-cache": "newer than the kept runs, and Megatron's tests of datasets look at no loss mask",
    "qk-clip-negative-head": "newer than the kept runs; Megatron's tests of clipping ask for a GPU",
    "scheduler-restore": "newer than the kept runs; its test, test_optimizer_param_scheduler.py, comes into a group with the next one",
}
"""Overlays of Megatron that none of these unit tests reaches, and why."""
