"""Run in a fresh interpreter: features of real configuration objects of Megatron, in a process and by their repr, as JSON.

The release is the one that is first on the path.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp_overlays.concerns import config_files, process
from megacpp_overlays.concerns.configuration import Configuration
from megacpp_overlays.concerns.features import FEATURES
from megacpp_overlays.concerns.predicates import Ternary, of_feature


def _features(configuration: Configuration) -> dict[str, list[str]]:
    return {each.value: [one.name for one in FEATURES if of_feature(one, configuration) is each] for each in Ternary}


def _dense() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)


def _latent() -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    model = MLATransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        num_moe_experts=4,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_z_loss_coeff=1e-3,
        add_bias_linear=False,
        mtp_num_layers=1,
        bf16=True,
        recompute_granularity="selective",
        calculate_per_token_loss=True,
    )
    return (
        model,
        OptimizerConfig(use_distributed_optimizer=True, bf16=True),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
    )


def _hybrid() -> Any:
    """Return a configuration that does not mention Mamba, and a Mamba layer that has it."""
    import torch
    from megatron.core.ssm.mamba_mixer import MambaMixer

    config = _dense()
    mixer = object.__new__(MambaMixer)
    torch.nn.Module.__init__(mixer)
    mixer.config = config
    return config, mixer


CASES: dict[str, Callable[[], Any]] = {"dense": _dense, "latent": _latent, "hybrid": _hybrid}


def main() -> None:
    """Print the features of each configuration as JSON."""
    out = os.dup(1)
    os.dup2(2, 1)  # prints of upstream go to stderr
    report: dict[str, Any] = {}
    for name, make in CASES.items():
        kept = make()
        here = process.of_this_process()
        assert here is not None, name
        config = kept[0] if isinstance(kept, tuple) else kept
        with tempfile.TemporaryDirectory() as folder:
            (file := Path(folder, "config.txt")).write_text(repr(config))
            report[name] = {
                "process": _features(here),
                "repr": _features(config_files.read(file)),
                "origin": here.origin,
            }
        del kept, config
        gc.collect()
    report["nothing is left"] = process.of_this_process() is None
    os.write(out, json.dumps(report).encode())


if __name__ == "__main__":
    sys.exit(main())
