"""A launcher as a user of megatron-bridge could have written it: a small hybrid model, mock data, and its `pretrain`.

Nothing in it is of this project. The layers are Megatron's local modules, because no wheel of Transformer Engine is complete.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import bridge_stand_ins  # noqa: F401 -- before what asks for them
import torch
from local_stack import hybrid_stack_spec
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.models.transformer_config import MLATransformerConfig
from megatron.bridge.training import config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.core.transformer.enums import AttnBackend

PATTERN = "D-E"
"""DeepSeek sparse attention over absorbed latent attention, an MLP, experts."""
SEQUENCE = 64
SEED = 1234
WEIGHT_DECAY = 0.01


@dataclass
class Provider(HybridModelProvider, MLATransformerConfig):
    """A hybrid model with latent attention: megatron-bridge has both, and no class that is both."""


def model(tensor_parallel: int) -> Provider:
    """Return the configuration of the model."""
    return Provider(
        hybrid_layer_pattern=PATTERN,
        hybrid_stack_spec=hybrid_stack_spec,
        transformer_impl="local",
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        seq_length=SEQUENCE,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        position_embedding_type="rope",
        rope_type="rope",
        multi_latent_attention=True,
        q_lora_rank=32,
        kv_lora_rank=64,
        qk_head_dim=16,
        qk_pos_emb_head_dim=16,
        v_head_dim=16,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=4,
        dsa_indexer_head_dim=32,
        dsa_indexer_topk=16,
        dsa_indexer_loss_coeff=0.01,
        dsa_indexer_rotate_activation=False,  # Megatron takes it from a package that has to be compiled
        num_moe_experts=4,
        moe_ffn_hidden_size=256,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 -- no password
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_backend=AttnBackend.unfused,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def container(chosen: argparse.Namespace) -> config.ConfigContainer:
    """Return everything that `pretrain` is told."""
    sharded = chosen.distributed_optimizer
    return config.ConfigContainer(
        model=model(chosen.tensor_parallel),
        train=config.TrainingConfig(train_iters=chosen.steps, global_batch_size=4, micro_batch_size=2),
        validation=config.ValidationConfig(eval_iters=0, eval_interval=1000),
        optimizer=config.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            weight_decay=WEIGHT_DECAY,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=sharded,
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            start_weight_decay=WEIGHT_DECAY,
            end_weight_decay=WEIGHT_DECAY,
            weight_decay_incr_style="constant",
        ),
        ddp=config.DistributedDataParallelConfig(
            use_distributed_optimizer=sharded, overlap_grad_reduce=sharded, grad_reduce_in_fp32=True
        ),
        dataset=config.MockGPTDatasetConfig(
            seq_length=SEQUENCE,
            random_seed=SEED,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
            num_workers=0,
        ),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=255),
        logger=config.LoggerConfig(log_interval=1),
        checkpoint=config.CheckpointConfig(),
        dist=config.DistributedInitConfig(distributed_backend=chosen.backend),
        rng=config.RNGConfig(seed=SEED),
    )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--backend", default="nccl")
    pretrain(container(parser.parse_args()), forward_step)


if __name__ == "__main__":
    main()
