"""Probe whether gradients under Torch FSDP2 are divided by tokens where losses are sums of tokens.

`finalize_model_grads` asks each wrapper of a model to scale its gradients. That of Torch FSDP2 has the method of its base class, which does nothing.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

WRAPPER = "TorchFullyShardedDataParallel"
TARGET = Target("megatron-core", "megatron.core.distributed.torch_fully_sharded_data_parallel", f"{WRAPPER}.__init__")
METHOD = "scale_gradients"
UNSCALED = "unscaled"


def probe(tree: SourceTree) -> Finding:
    """Return whether that method does nothing for it."""
    return forms.finding("fsdp2-per-token-loss", TARGET, tree)
