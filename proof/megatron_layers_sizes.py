"""Models with every type of layer: their sizes on a CPU and on a GPU, and the requirements of a launch there."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from megatron_sizes import LOCAL, REST, SPARSE, WITHOUT_KERNELS, Sizes

INTERPRETED = Path(__file__).resolve().parent / "on_cpu_interpreted"
PACKAGES = ("mamba-ssm", "einops", "fla-core")
"""Packages from which Megatron takes Mamba-2 and gated delta nets."""


class Rule(Enum):
    """The implementation of a gated delta net, as `launchers/every_layer_stack.py` names the stacks."""

    IN_PYTORCH = "hybrid_stack_spec"
    BY_KERNELS = "with_kernels"


@dataclass(frozen=True)
class Model:
    """Layers that Megatron lets be together."""

    id: str
    pattern: str
    """As Megatron writes it: behind the slash are the layers that predict a second token."""
    rule: Rule = Rule.IN_PYTORCH

    @property
    def is_latent(self) -> bool:
        """Whether attention is over latent keys; Megatron refuses softmax attention in the same model."""
        return "*" not in self.pattern


LATENT = Model("latent", "MGD+-E/GE")
SOFTMAX = Model("softmax", "MG*-E/*E")
KERNELS = Model("kernels", LATENT.pattern, Rule.BY_KERNELS)
MODELS = (LATENT, SOFTMAX, KERNELS)
ALWAYS = (*LOCAL, *REST, "--disable-mamba-mem-eff-path")  # that path wants causal-conv1d, which has to be compiled


def packages() -> dict[str, str | None]:
    """Return the version of each package that these layers want, None of one that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def sized(model: Model, host: Sizes) -> Sizes:
    """Return a model as large as a host lets it be, for launches like those of other models there."""
    spec = ("--spec", "every_layer_stack", model.rule.value, "--hybrid-layer-pattern", model.pattern)
    return (_on_cpu if host.host == "cpu" else _on_gpu)(model, replace(host, pattern=model.pattern), (*spec, *ALWAYS))


def _on_cpu(model: Model, host: Sizes, words: tuple[str, ...]) -> Sizes:
    """A minute of one core a launch, nearly all of it in Triton's interpreter."""
    latent = (
        *SPARSE,
        *("--q-lora-rank", "32", "--kv-lora-rank", "64", "--qk-head-dim", "16"),
        *("--qk-pos-emb-head-dim", "16", "--v-head-dim", "16"),
        *("--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "32", "--dsa-indexer-topk", "16"),
    )
    arguments = (
        *("--distributed-backend", "gloo", "--no-bias-swiglu-fusion", *words, *(latent if model.is_latent else ())),
        *("--lr", "1e-3", "--min-lr", "1e-4", "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--seq-length", "32", "--max-position-embeddings", "32", "--vocab-size", "255"),
        *("--micro-batch-size", "2", "--global-batch-size", "2", "--num-experts", "4"),
        *("--linear-num-key-heads", "2", "--linear-num-value-heads", "4"),
        *("--linear-key-head-dim", "16", "--linear-value-head-dim", "16"),
        *("--mamba-state-dim", "16", "--mamba-head-dim", "32", "--mamba-num-groups", "1"),
    )
    return replace(
        host,
        arguments=arguments,
        steps=6,
        env={**host.env, "TRITON_INTERPRET": "1"},
        path=(INTERPRETED, WITHOUT_KERNELS),
    )


def _on_gpu(model: Model, host: Sizes, words: tuple[str, ...]) -> Sizes:
    """Return sizes that are small for a GPU: a launch takes half a minute to begin, whatever its size."""
    latent = (
        *SPARSE,
        *("--q-lora-rank", "256", "--kv-lora-rank", "512", "--qk-head-dim", "128"),
        *("--qk-pos-emb-head-dim", "64", "--v-head-dim", "128"),
        *("--dsa-indexer-n-heads", "16", "--dsa-indexer-head-dim", "128", "--dsa-indexer-topk", "256"),
    )
    arguments = (
        *(*words, *(latent if model.is_latent else ())),
        *("--lr", "1e-4", "--min-lr", "1e-5", "--lr-warmup-fraction", "0.25"),
        *("--hidden-size", "1024", "--num-attention-heads", "8"),
        *("--seq-length", "1024", "--max-position-embeddings", "1024", "--vocab-size", "32767"),
        *("--micro-batch-size", "1", "--global-batch-size", "2", "--num-experts", "8"),
        *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
        *("--linear-key-head-dim", "128", "--linear-value-head-dim", "128"),
    )
    return replace(host, arguments=arguments, steps=8)
