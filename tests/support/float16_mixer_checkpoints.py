"""A_log in files of Megatron's dist_checkpointing, on the CPU: a script that prints one line for each way.

`cast` is a run whose A_log was cast to bf16, `kept` one that keeps it in fp32. Both also have a bf16 weight, and
`Float16OptimizerWithFloat16Params` after one step. Its constructor takes CUDA tensors only and is left out.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class Run:
    """A bf16 weight and an A_log, with their state in an optimizer."""

    def __init__(self, how: str, *, seed: int) -> None:
        import torch
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.rand(4, generator=generator) + 1 for name in ("weight", "A_log")}
        cast = ["weight", "A_log"] if how == "cast" else ["weight"]
        self.model = {
            name: torch.nn.Parameter(value.bfloat16() if name in cast else value) for name, value in values.items()
        }
        self.main = {
            name: torch.nn.Parameter(values[name].clone()) if name in cast else parameter
            for name, parameter in self.model.items()
        }
        group = dict.fromkeys(("lr_mult", "wd_mult", "is_expert_parallel", "is_decoupled_lr", "default_config"), 1.0)
        self.inner = torch.optim.AdamW([{"params": list(self.main.values()), **group}], lr=1e-4)
        for value in self.main.values():
            value.grad = torch.rand(4, generator=generator)
        self.inner.step()
        for name in cast:
            self.model[name].data.copy_(self.main[name].data)
        self.optimizer = object.__new__(Float16OptimizerWithFloat16Params)
        vars(self.optimizer).update(
            optimizer=self.inner,
            config=SimpleNamespace(fp16=False, bf16=True),
            grad_scaler=None,
            is_stub_optimizer=False,
            init_state_fn=lambda *_: None,
            float16_groups=[[self.model[name] for name in cast]],
            fp32_from_float16_groups=[[self.main[name] for name in cast]],
            fp32_from_fp32_groups=[[value for name, value in self.model.items() if name not in cast]],
        )

    def sharded(self, contents: str) -> dict[str, Any]:
        """Return the state dict of a checkpoint: of the model alone, or of the model with its optimizer."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        model = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in self.model.items()}
        whole = {"optimizer": self.optimizer.sharded_state_dict(dict(model))} if contents == "whole" else {}
        return {"model": model, **whole}

    def load(self, state: dict[str, Any]) -> None:
        """Load the state dict of a checkpoint."""
        import torch

        with torch.no_grad():
            for name, value in state["model"].items():
                self.model[name].copy_(value)
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])


def same(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one.detach().double(), other.detach().double())


def outcome(folder: Path, saved: str, loaded: str, contents: str) -> str:
    """Return in words whether A_log, its moments and the fp32 value that is updated are the same after saving and loading."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    first, other = Run(saved, seed=1), Run(loaded, seed=2)
    dist_checkpointing.save(first.sharded(contents), str(folder))
    try:
        state = dist_checkpointing.load(other.sharded(contents), str(folder))
    except CheckpointException as error:
        return f"fails: {str(error).strip().splitlines()[-1].partition(': [')[0]}"
    other.load(state)
    one, two = first.model["A_log"], other.model["A_log"]
    words = ["same" if same(one, two) else "rounded" if same(one.bfloat16(), two) else "other"]
    if contents == "whole":
        moments = first.inner.state[first.main["A_log"]], other.inner.state[other.main["A_log"]]
        words.append(
            "same" if all(same(moments[0][key], moments[1][key]) for key in ("exp_avg", "exp_avg_sq")) else "other"
        )
        main = first.main["A_log"], other.main["A_log"]
        words.append("same" if same(*main) else "rounded" if same(main[0].bfloat16(), main[1]) else "other")
    return " ".join(words)


def main() -> None:
    warnings.simplefilter("ignore")
    import torch

    import megacpp_overlays  # noqa: F401 - arms the overlays

    try:
        import psutil  # noqa: F401
    except ImportError:  # Megatron's writer logs with it how much memory it holds
        sys.modules["psutil"] = ModuleType("psutil")
        vars(sys.modules["psutil"])["Process"] = lambda *_: SimpleNamespace(
            memory_info=lambda: SimpleNamespace(rss=0, uss=0)
        )
    if not torch.cuda.is_available():
        # The writer waits for a device and makes small tensors for its messages there.
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: torch.device("cpu")
    with tempfile.TemporaryDirectory() as root:
        torch.distributed.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=0, world_size=1)
        for saved, loaded, contents in product(("cast", "kept"), ("cast", "kept"), ("model", "whole")):
            folder = Path(root) / f"{saved}-{loaded}-{contents}"
            folder.mkdir()
            sys.stdout.write(f"{saved} {loaded} {contents}: {outcome(folder, saved, loaded, contents)}\n")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
