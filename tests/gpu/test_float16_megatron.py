"""Mamba-3's fp32 parameters through Megatron: Float16Module, DDP, both mixed-precision optimizers, a checkpoint.

One process, one GPU, NCCL. Each case is a fresh interpreter (this file as a script), because a case is about which
overlays were on before Megatron was imported. Needs megatron-core; neither Transformer Engine nor Apex. With psutil
the checkpoint goes through files; without it Megatron cannot write them, and state is handed over by name.
"""

# ruff: noqa: T201 - a case reports on stdout

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, SUPPORT

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]

FP32 = ("dt_bias", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "D")
OPTIMIZERS = ("float16", "dp_reshardable")
"""Float16OptimizerWithFloat16Params, and DistributedOptimizer with the sharding that Megatron saves by default. Its
other shardings do not load with torch's Adam (0.19.2, whatever the dtypes), which is all there is here."""
NEIGHBOURS = "float16-optimizer-state-ids,float16-distributed-order"


def run_case(optimizer: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", __file__, optimizer, str(folder)]
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "MEGACPP_OVERLAYS_LOG": str(folder / "overlays.log"), **variables}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_S, check=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_exempt_parameters_train_in_fp32_and_come_back_from_a_checkpoint(optimizer: str, tmp_path: Path) -> None:
    done = run_case(optimizer, tmp_path)

    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all parameters and states are equal" in done.stdout


def test_without_the_overlay_the_bits_are_lost(tmp_path: Path) -> None:
    done = run_case("float16", tmp_path, MEGACPP_OVERLAYS="off")

    assert done.returncode != 0
    assert "AssertionError: dt_bias is torch.bfloat16" in done.stderr


def test_without_its_neighbours_it_stays_out(tmp_path: Path) -> None:
    """Without them no optimizer could save the state of such a model; pack 16 shows that on a model of both kinds."""
    done = run_case("float16", tmp_path, MEGACPP_OVERLAYS_DISABLE=NEIGHBOURS)

    assert done.returncode != 0
    assert "AssertionError: dt_bias is torch.bfloat16" in done.stderr
    assert "it needs float16-distributed-order, which is disabled here" in (tmp_path / "overlays.log").read_text()


# Code of a case


def mamba3(hidden: int, heads: int, seed: int) -> Any:
    """Return a block with the parameters of mamba-ssm's Mamba3, under its qualified name, and plain arithmetic."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Any:
        """Values around 1 with all the bits of an fp32 number."""
        return torch.nn.Parameter((1 + 0.25 * torch.rand(*shape, generator=generator)).cuda())

    class Mamba3(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.in_proj = torch.nn.Linear(hidden, 2 * heads, bias=False)
            self.dt_bias, self.B_bias, self.C_bias = values(heads), values(heads, 1, 4), values(heads, 1, 4)
            self.norm = torch.nn.LayerNorm(hidden)
            self.mimo_x, self.mimo_z, self.mimo_o = values(heads, 2), values(heads, 2), values(heads, 2)
            self.D = values(heads)
            self.out_proj = torch.nn.Linear(heads, hidden, bias=False)
            for each in (self.in_proj.weight, self.out_proj.weight):
                each.data = torch.randn(each.shape, generator=generator) * 0.1

        def forward(self, hidden_states: Any) -> Any:
            dt, x = self.in_proj(self.norm(hidden_states)).float().chunk(2, dim=-1)
            scale = (self.B_bias * self.C_bias).sum(dim=(1, 2)) + (self.mimo_x * self.mimo_z * self.mimo_o).sum(dim=1)
            y = torch.nn.functional.softplus(dt + self.dt_bias) * x * scale + self.D * x
            return hidden_states + self.out_proj(y.to(hidden_states.dtype))

    Mamba3.__module__, Mamba3.__qualname__ = "mamba_ssm.modules.mamba3", "Mamba3"
    return Mamba3()


class Run:
    """A model in Float16Module and DDP, with an optimizer of Megatron."""

    def __init__(self, optimizer: str, seed: int) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module, MegatronModule
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.distributed = optimizer != "float16"
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=2, bf16=True, params_dtype=torch.bfloat16
        )
        model = MegatronModule(config)
        # The embedding makes the bf16 grad buffer the first one, as in a real model.
        model.embedding = torch.nn.Linear(16, 32, bias=False)
        model.embedding.weight.data = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
        model.layers = torch.nn.Sequential(*(mamba3(32, 8, seed + number) for number in range(2)))
        model.forward = lambda inputs: model.layers(model.embedding(inputs))
        model.cuda()
        self.before = {name: value.detach().clone() for name, value in model.named_parameters()}
        identities = {name: id(value) for name, value in model.named_parameters()}
        self.inner = model
        wrapped = Float16Module(config, model)
        assert {name: id(value) for name, value in model.named_parameters()} == identities
        self.check_exempt(model, exact=True)
        self.model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=False, use_distributed_optimizer=self.distributed
            ),
            module=wrapped,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=self.distributed,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.metadata = {"distrib_optim_sharding_type": optimizer} if self.distributed else None

    @property
    def parameters(self) -> dict[str, Any]:
        return {name.split("module.module.")[-1]: value for name, value in self.model.named_parameters()}

    @property
    def innermost(self) -> Any:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0]

    def check_exempt(self, model: Any, *, exact: bool) -> None:
        import torch

        for name, value in model.named_parameters():
            last = name.rpartition(".")[2]
            assert (value.dtype is torch.float32) == (last in FP32), f"{last} is {value.dtype}"
            assert not exact or last not in FP32 or torch.equal(value, self.before[name]), f"{last} lost bits"

    def step(self, seed: int) -> float:
        import torch

        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).cuda()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(inputs).float().pow(2).mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return float(loss)

    def check_training(self) -> None:
        """Check dtypes of gradients, and that exempt parameters moved by less than bf16 can resolve."""
        import torch

        for name, value in self.parameters.items():
            exempt = name.rpartition(".")[2] in FP32
            assert value.main_grad.dtype is (torch.float32 if exempt else torch.bfloat16), name
            if exempt:
                moved = (value.detach() - self.before[name]).abs()
                assert bool((moved > 0).any()), f"{name} did not move"
                assert float(moved.max()) < 2**-9, f"{name} moved by {float(moved.max())}"
                lost = value.detach() != value.detach().bfloat16().float()
                assert bool(lost.any()), f"{name} holds bf16 numbers only"
                print(f"  {name}: {value.dtype}, moved by {float(moved.max()):.2e}; bf16 resolves {2**-8:.2e} around 1")

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        model = self.inner.sharded_state_dict()
        options = {"metadata": self.metadata} if self.metadata else {}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading, **options)}

    def load(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        # DistributedOptimizer leaves one step tensor in all states of a torch Adam, which then counts them all.
        for each in self.innermost.optimizer.state.values():
            each["step"] = each["step"].clone()

    def states(self) -> dict[str, Any]:
        """Return the master copy and Adam's moments of each parameter, paired without the index map under test."""
        optimizer = self.innermost
        if self.distributed:
            model = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
            main = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        else:
            model = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
            main = [*optimizer.fp32_from_float16_groups, *optimizer.fp32_from_fp32_groups]
        names = {id(value): name for name, value in self.parameters.items()}
        pairs = [pair for group in zip(model, main, strict=True) for pair in zip(*group, strict=True)]
        assert len(pairs) == len(names)
        result = {}
        for parameter, master in pairs:
            state = optimizer.optimizer.state[master]
            tensors = {"master": master, **{key: state[key] for key in ("exp_avg", "exp_avg_sq")}}
            result |= {f"{names[id(parameter)]}.{key}": value.detach().clone() for key, value in tensors.items()}
        return result


def hand_over(saved: Run, fresh: Run, folder: Path) -> str:
    """Move the sharded state of one run to another; return the way: files, or entries by name."""
    from megatron.core import dist_checkpointing

    try:
        import psutil  # noqa: F401 - Megatron's writer needs it
    except ImportError:
        state = saved.sharded(is_loading=False)
        stored = {identity(entry): value_of(entry) for entry in entries(state)}
        fresh.load(read_back(fresh.sharded(is_loading=True), state, stored))
        return f"{len(stored)} entries by name"
    dist_checkpointing.save(saved.sharded(is_loading=False), str(folder))
    fresh.load(dist_checkpointing.load(fresh.sharded(is_loading=True), str(folder)))
    return f"{len(list(folder.iterdir()))} files"


def identity(entry: Any) -> tuple[str, str]:
    return entry.key, str(getattr(entry, "global_offset", ""))


def value_of(entry: Any) -> Any:
    return entry.data.detach().clone() if hasattr(entry.data, "detach") else copy.deepcopy(entry.data)


def entries(state: Any) -> list[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    found = [value for value in nested_values(state) if hasattr(value, "key")]
    assert len({identity(entry) for entry in found}) == len(found)
    return found


def read_back(state: Any, saved: Any, stored: dict[tuple[str, str], Any]) -> Any:
    """Fill a sharded state as a checkpoint does: entries by name, local values as they are, the rest from `saved`."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(state, dict):
        return {key: read_back(value, saved[key], stored) for key, value in state.items()}
    if isinstance(state, list):
        return [read_back(value, other, stored) for value, other in zip(state, saved, strict=True)]
    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    return stored[identity(state)] if hasattr(state, "key") else saved


def main(optimizer: str, folder: Path) -> None:
    """Train, hand the state to a fresh run with other values, compare, and train both one step more."""
    import torch

    import megacpp_overlays

    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.package_info import __version__

    parallel_state.initialize_model_parallel()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, megatron-core {__version__}, {optimizer}")
    saved, fresh = Run(optimizer, seed=1), Run(optimizer, seed=11)
    for record in megacpp_overlays.audit().records:
        print(f"  {record.overlay.id}: {record.decision.value}")
    losses = [saved.step(seed) for seed in range(3)]
    saved.check_training()
    saved.check_exempt(saved.model, exact=False)
    # As many steps on other data: DistributedOptimizer does not restore the step count of a torch Adam.
    for seed in range(90, 93):
        fresh.step(seed)
    print(f"trained: losses {', '.join(f'{loss:.6f}' for loss in losses)}")
    (folder / "checkpoint").mkdir()
    before = saved.states()
    through = hand_over(saved, fresh, folder / "checkpoint")
    compare(before, saved.states(), "saving changed")
    compare(before, fresh.states(), "loading lost")
    compare(saved.parameters, fresh.parameters, "loading lost")
    assert saved.step(9) == fresh.step(9)
    compare(saved.parameters, fresh.parameters, "the next step differs in")
    print(f"through {through}: all parameters and states are equal, before and after one more step")
    torch.distributed.destroy_process_group()


def compare(one: dict[str, Any], other: dict[str, Any], prefix: str) -> None:
    import torch

    assert one.keys() == other.keys()
    different = [
        name for name in one if one[name].dtype is not other[name].dtype or not torch.equal(one[name], other[name])
    ]
    assert not different, f"{prefix} {', '.join(different)}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(sys.argv[1], Path(sys.argv[2]))
