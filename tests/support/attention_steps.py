"""Run in a fresh interpreter: a real `DSAttention` with absorbed inputs trains on a CPU; its losses and results as JSON.

    python tests/support/attention_steps.py

The release is the one that is first on the path, and overlays are as the environment has them. Queries, latent keys and the
values' up projection are learnt, each way from the same beginning. Every operator is watched for results as large as all
scores, (batch, heads, queries, keys).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from typing import Any

import megacpp_overlays

# isort: split
import torch
from torch.utils._python_dispatch import TorchDispatchMode

VARIANT = "megatron.core.transformer.experimental_attention_variant"
OVERLAYS = ("dsa-sparse-attention", "sparse-mla-dimensions", "fp8-quantized-unwrap")
ROWS, BATCH, HIDDEN, HEADS, RANK, ROPE, VALUE, TOPK = 24, 2, 16, 12, 4, 2, 3, 5
STEPS = 4


class DuplicatedLinear(torch.nn.Linear):
    """A projection as the indexer asks for one; its twin of Transformer Engine is not on every host."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: Any, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)

    def forward(self, given: Any) -> Any:
        return super().forward(given), None


class Watch(TorchDispatchMode):
    """Counts results of operators that have as many elements as all scores of a batch, or more."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.seen, self._least = 0, batch * HEADS * ROWS * ROWS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            self.seen += isinstance(each, torch.Tensor) and each.numel() >= self._least
        return result


def attention(backend: str, dtype: torch.dtype, coefficient: float) -> Any:
    """Return a DSA layer's attention of one rank."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    dsa = importlib.import_module(f"{VARIANT}.dsa")
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        q_lora_rank=HIDDEN,
        kv_lora_rank=RANK,
        qk_head_dim=4,
        qk_pos_emb_head_dim=ROPE,
        v_head_dim=VALUE,
        rope_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=4,
        dsa_indexer_topk=TOPK,
        dsa_indexer_loss_coeff=coefficient,
        dsa_indexer_use_sparse_loss=False,
        dsa_indexer_rotate_activation=False,
    )
    config.dsa_kernel_backend = backend  # not validated: TileLang may not be there
    parts = dsa.DSAIndexerSubmodules(
        linear_wq_b=ModuleSpec(module=DuplicatedLinear),
        linear_wk=ModuleSpec(module=DuplicatedLinear),
        k_norm=ModuleSpec(module=WrappedTorchNorm),
        linear_weights_proj=ModuleSpec(module=DuplicatedLinear),
    )
    made = dsa.DSAttention(
        config=config,
        submodules=dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=parts)),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        k_channels=RANK + ROPE,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
    ).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / each.shape[-1] ** 0.5)
    return made.train()


def masks(kind: str) -> dict[str, Any]:
    """Return the arguments that tell a layer the keys that each query may see."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    if kind == "packed":
        bounds = torch.tensor([0, 9, 10, ROWS], dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=14, max_seqlen_kv=14
        )
        return {"attention_mask": None, "attn_mask_type": AttnMaskType.causal, "packed_seq_params": packed}
    if kind == "masked":
        hidden = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1).repeat(BATCH, 1, 1, 1)
        hidden[0, 0, :, 3] = hidden[1, 0, 7] = True  # a key that no query sees, and a query that sees no key
        return {"attention_mask": hidden, "attn_mask_type": None}
    return {"attention_mask": None, "attn_mask_type": AttnMaskType.causal}


def train(kind: str, backend: str = "none", dtype: torch.dtype = torch.float32, coefficient: float = 0.0) -> Any:
    """Return losses, the learnt tensors, and how many results were as large as all scores."""
    made, generator = attention(backend, dtype, coefficient), torch.Generator().manual_seed(6)
    dim, batch = RANK + ROPE, 1 if kind == "packed" else BATCH

    def numbers(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(dtype)

    to_query, to_key, up = numbers(HIDDEN, HEADS * dim), numbers(HIDDEN, dim), numbers(HEADS, VALUE, RANK)
    learnt = [each.requires_grad_() for each in (to_query, to_key, up)]
    optimizer = torch.optim.SGD([*learnt, *made.parameters()], lr=0.01)
    x, qr, wanted = (numbers(ROWS, batch, width) for width in (HIDDEN, HIDDEN, HEADS * VALUE))
    losses, watch = [], Watch(batch)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with watch:
            query = (x @ to_query).view(ROWS, batch, HEADS, dim)
            key = (x @ to_key).view(ROWS, batch, 1, dim)
            if kind == "packed":
                query, key = query.squeeze(1), key.squeeze(1)
            output = made(query, key, None, x=x, qr=qr, up_v_weight=up, **masks(kind))
            loss = (output - wanted).float().square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    indexer = [each.detach() for each in made.parameters() if coefficient]
    return {
        "losses": losses,
        "learnt": [each.detach().float().flatten().tolist() for each in [*learnt, *indexer]],
        "all scores": watch.seen,
    }


def main() -> None:
    """Print the results of all ways."""
    # Where TileLang is installed its kernels would be compiled, for a GPU. These steps are about the calls that it declines.
    sys.modules["tilelang"] = None  # type: ignore[assignment]
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        found = {
            "causal": train("causal"),
            "packed": train("packed"),
            "masked": train("masked"),
            "causal, bfloat16": train("causal", dtype=torch.bfloat16),
            "with an indexer's loss": train("causal", coefficient=0.5),
        }
        if importlib.util.find_spec(f"{VARIANT}.dsa_tilelang_kernels") is not None:
            found |= {
                f"tilelang, {kind}": train(kind, "tilelang", torch.bfloat16) for kind in ("causal", "packed", "masked")
            }
        torch.distributed.destroy_process_group()
    records = megacpp_overlays.audit().records
    calls = {
        each.overlay.id: sum(count for _, count in each.calls)
        for each in records
        if each.overlay.id in OVERLAYS and each.decision.value == "active"
    }
    json.dump({"ways": found, "calls": calls}, sys.stdout)


if __name__ == "__main__":
    main()
