"""Blocks of heads over which Megatron's fused rotary kernels of multi-latent attention are tuned, and their accesses behind the last head.

A program of such a kernel rotates BLOCK_H heads of one token, and the tuner tries 1 to 128. Where BLOCK_H is smaller than the heads and does
not divide them, the last block goes on into the next token, or behind the tensor: its mask compares an offset in the block with all heads
(https://github.com/NVIDIA/Megatron-LM/issues/7103). And in place, queries are loaded in one order and stored in another, and nothing makes
the warps of a program wait for each other (https://github.com/NVIDIA/Megatron-LM/issues/4640).

Up to 0.12.3 there are no such kernels. From 0.13.0 to 0.19.2 they are named after queries and keys; on main since 2026-08-17, and on
dev, they take any tensor. No tree has a repair.

The seam calls upstream's launches with other configurations of the tuner. The arguments of a launch, and the numbers that a program
reads, decide whether these are right. So the verdict rests on the whole module.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target("megatron-core", "megatron.core.fusions.fused_mla_yarn_rope_apply", "ApplyMLARotaryEmbQ")
OF_QUERIES, OF_ANY = "queries-and-keys", "any-tensor"


def probe(tree: SourceTree) -> Finding:
    """Return whether blocks of heads are tried that do not divide the heads."""
    return forms.finding("mla-rope-head-blocks", TARGET, tree)
