"""A small GPTModel of megatron.core whose first layer mixes tokens with a block that keeps Mamba-3's contract.

Nothing here knows about overlays except one call: the block marks the parameters that must stay fp32, as the author
of such a block would. Every shape below uses s = sequence, b = batch, d = hidden size, h = heads, p = head width,
r = MIMO rank, n = state size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from megacpp_overlays.fp32_marks import keep_in_fp32

HEADS, STATE, RANK = 4, 8, 2


class TinyMamba3Mixer(MegatronModule):
    """A selective state space mixer with the fp32 parameters of mamba-ssm's `Mamba3` (MIMO), by name and shape.

    The recurrence is the scalar-decay one in its quadratic form: without chunks, rotary state or a trapezoid, and
    in fp32 throughout. It takes the place of self-attention in a transformer layer spec.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **_for_attention: Any) -> None:
        super().__init__(config)
        width = config.hidden_size // HEADS
        self.layer_number = layer_number
        self._split = [config.hidden_size, config.hidden_size, HEADS, HEADS, RANK * STATE, RANK * STATE]
        self.in_proj = nn.Linear(config.hidden_size, sum(self._split), bias=False, dtype=config.params_dtype)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False, dtype=config.params_dtype)
        step = torch.exp(torch.empty(HEADS).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = _fp32(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) == step
        self.D = _fp32(_near(1.0, HEADS))
        self.B_bias = _fp32(_near(1.0, HEADS, RANK, STATE))
        self.C_bias = _fp32(_near(1.0, HEADS, RANK, STATE))
        self.mimo_x = _fp32(_near(1.0 / RANK, HEADS, RANK, width))
        self.mimo_z = _fp32(_near(1.0, HEADS, RANK, width))
        self.mimo_o = _fp32(_near(1.0 / RANK, HEADS, RANK, width))

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, **_for_attention: Any
    ) -> tuple[Tensor, None]:
        """Map [s, b, d] to [s, b, d]; the second item is the bias that the layer would add, so None."""
        gate, value, dt, decay, b, c = self.in_proj(hidden).float().split(self._split, dim=-1)
        heads, state = (*hidden.shape[:2], HEADS, -1), (*hidden.shape[:2], 1, RANK, STATE)
        dt = functional.softplus(dt + self.dt_bias.float())
        x = torch.einsum("sbhp,hrp->sbhrp", value.view(heads), self.mimo_x.float())
        y = _scan(
            decay=-functional.softplus(decay) * dt,
            x=x * dt[..., None, None],
            b=functional.rms_norm(b.view(state), (STATE,)) + self.B_bias.float(),
            c=functional.rms_norm(c.view(state), (STATE,)) + self.C_bias.float(),
        )
        y = y + self.D.float()[:, None, None] * x
        z = torch.einsum("sbhp,hrp->sbhrp", gate.view(heads), self.mimo_z.float())
        mixed = torch.einsum("sbhrp,hrp->sbhp", y * functional.silu(z), self.mimo_o.float())
        return self.out_proj(mixed.reshape(hidden.shape).to(hidden.dtype)), None


def _fp32(value: Tensor) -> nn.Parameter:
    return keep_in_fp32(nn.Parameter(value))


def _near(centre: float, *shape: int) -> Tensor:
    # Mamba-3 starts exactly at the centre, which bf16 can hold. A trained value is not so lucky.
    return centre + 0.05 * torch.randn(*shape)


def _scan(*, decay: Tensor, x: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return y[t] = c[t] . sum over s <= t of exp(decay[s+1] + ... + decay[t]) * b[s] x[s], summed over ranks of s.

    decay [s, b, h]; x [s, b, h, r, p]; b and c [s, b, h, r, n]; the result has the shape of x.
    """
    total = decay.cumsum(0)
    reach = total[:, None] - total[None]  # [t, s, b, h]
    causal = torch.ones(reach.shape[:2], dtype=torch.bool, device=reach.device).tril()
    weight = reach.masked_fill(~causal[..., None, None], -math.inf).exp()
    state_input = torch.einsum("sbhrn,sbhrp->sbhnp", b, x)
    state = torch.einsum("tsbh,sbhnp->tbhnp", weight, state_input)
    return torch.einsum("tbhrn,tbhnp->tbhrp", c, state)


class CausalAttention(MegatronModule):
    """The attention core of the spec. Megatron's own local core allocates on a GPU, whatever the model is on."""

    def __init__(self, config: TransformerConfig, **_for_other_cores: Any) -> None:
        super().__init__(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_mask: Any, **_for_other_cores: Any) -> Tensor:
        """Map query, key and value, each [s, b, h, p], to [s, b, h * p]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class TinyGPT(GPTModel):
    """GPTModel with Liger's fused linear cross entropy in place of logits and a loss on them."""

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Map tokens [b, s] to the input of the output layer, [s, b, d]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        embedded = self.embedding(input_ids=tokens, position_ids=positions)
        return self.decoder(hidden_states=embedded, attention_mask=None)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token, fp32 [s, b]; tokens and labels are [b, s]."""
        return per_token_loss(self.hidden_states(tokens), self.output_layer.weight, labels)


def per_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return Liger's loss of each token, [s, b]: hidden [s, b, d], weight [v, d], labels [b, s]."""
    loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return loss(weight, hidden.flatten(0, 1), labels.t().flatten()).view(hidden.shape[:2])


def masked_mean(per_token: Tensor, mask: Tensor, *, counted: Tensor | None = None) -> Tensor:
    """Return the sum of the losses that count over how many count: per_token [s, b], mask [b, s] of 0 and 1.

    `counted` replaces the number of ones in the mask, for a mean over more than this batch.
    """
    return (per_token * mask.t()).sum() / (mask.sum() if counted is None else counted)


def build_config() -> TransformerConfig:
    """Return the configuration; the same on CPU and GPU, so that both start from the same weights."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=HEADS,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        # The fusions are compiled or CUDA kernels; a tiny model on a CPU has no use for them.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def build_model(config: TransformerConfig, *, vocabulary: int, sequence: int, seed: int) -> TinyGPT:
    """Return the model on the CPU before Float16Module: a Mamba-3 layer, then an attention layer."""
    torch.manual_seed(seed)
    attention = get_gpt_layer_local_spec()
    attention.submodules.self_attention.submodules.core_attention = CausalAttention
    mamba = get_gpt_layer_local_spec()
    mamba.submodules.self_attention = ModuleSpec(module=TinyMamba3Mixer)
    block = TransformerBlockSubmodules(layer_specs=[mamba, attention], layer_norm=WrappedTorchNorm)
    return TinyGPT(config, block, vocabulary, sequence)
