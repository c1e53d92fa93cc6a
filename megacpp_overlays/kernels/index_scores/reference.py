"""Index scores of DeepSeek Sparse Attention in plain PyTorch: the truth that everything else is measured against.

The four-axis tensor is built, in the dtype of the inputs (use float64 for truth).
Source: section 2.1 of https://github.com/deepseek-ai/DeepSeek-V3.2-Exp/blob/main/DeepSeek_V3_2.pdf
"""

from __future__ import annotations

import torch


def scores(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool = True) -> torch.Tensor:
    """Return the weighted sum over heads of the rectified products of queries and keys.

    Args:
        q: (queries, batch, heads, dim), floating.
        weights: (queries, batch, heads).
        k: (keys, batch, dim); the heads share it.
        use_relu: False for models that weight the bare products, as GLM-5 does.

    Returns:
        (batch, queries, keys).
    """
    products = torch.einsum("sbhd,tbd->bhst", q, k)
    if use_relu:
        products = products.relu()
    return torch.einsum("bhst,sbh->bst", products, weights)


def gradients(
    grad: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, use_relu: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, weights and k for a gradient of the scores, (batch, queries, keys).

    By hand, without autograd, whose engine asks the driver for devices when it starts.
    """
    products = torch.einsum("sbhd,tbd->bhst", q, k)
    gate = (products > 0).to(products.dtype) if use_relu else torch.ones_like(products)
    behind = torch.einsum("bst,sbh,bhst->bhst", grad, weights, gate)
    of_q = torch.einsum("bhst,tbd->sbhd", behind, k)
    of_weights = torch.einsum("bst,bhst->sbh", grad, products * gate)
    of_k = torch.einsum("bhst,sbhd->tbd", behind, q)
    return of_q, of_weights, of_k
