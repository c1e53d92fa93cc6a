"""Training steps of a layer stack of `proof/launchers` on the CPU: losses, and parameters without a gradient, as JSON.

    python tests/support/local_stack_steps.py [MODULE PATTERN]

Run it in a fresh interpreter with `proof/on_cpu` and `proof/launchers` on its path. The model is a `HybridModel` of the
Megatron that is first on the path, built as Megatron's launcher builds it. MODULE has the stack, and PATTERN lists the layers in
Megatron's letters. The default is `local_stack` with `D-E`: absorbed latent attention with sparse attention, an MLP, and experts.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from typing import Any

import torch

ROWS, BATCH, WORDS, STEPS = 24, 2, 40, 3
"""Tokens of a sequence, sequences of a batch, tokens of the vocabulary, and training steps."""


def model(module: str = "local_stack", pattern: str = "D-E") -> Any:
    """Return a model in bfloat16. Its weights depend on the current random state.

    Args:
        module: the module with the `hybrid_stack_spec`.
        pattern: letters of the layers; those behind a slash predict a further token.
    """
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=len(pattern.partition("/")[0]),
        mtp_num_layers=pattern.count("/") or None,
        hidden_size=32,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        experimental_attention_variant="dsa",
        q_lora_rank=16,
        kv_lora_rank=32,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
        rope_type="rope",
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=16,
        dsa_indexer_topk=8,
        dsa_indexer_loss_coeff=0.01,
        dsa_indexer_rotate_activation=False,
    )
    made = HybridModel(
        config,
        importlib.import_module(module).hybrid_stack_spec,
        WORDS,
        ROWS,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
    )
    return made.bfloat16().cuda()


def main() -> None:
    """Train on one batch. Print the loss of each step, and the names of the parameters without a gradient in the last."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(5)
        trained = model(*sys.argv[1:])
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        tokens = torch.randint(0, WORDS, (BATCH, ROWS), generator=torch.Generator().manual_seed(3)).cuda()
        inputs = (tokens, torch.arange(ROWS).expand(BATCH, ROWS), None)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = trained(*inputs, labels=tokens.roll(-1, 1)).float().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        without = [name for name, each in trained.named_parameters() if each.grad is None]
        torch.distributed.destroy_process_group()
    json.dump({"losses": losses, "without a gradient": without}, sys.stdout)


if __name__ == "__main__":
    main()
