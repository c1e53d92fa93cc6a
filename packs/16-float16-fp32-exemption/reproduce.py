"""Mixed precision in Megatron: do parameters that must stay fp32 stay fp32, and can a model with them be saved?

Three defects, one overlay each:

    float16-fp32-exemption       wrapping a model rounds Mamba-3's fp32 parameters to bf16
    float16-optimizer-state-ids  Float16OptimizerWithFloat16Params saves optimizer state under other parameters' names
    float16-distributed-order    DistributedOptimizer cannot save or load such a model

A case about saving builds its fp32 parameters by itself and so does not depend on the first overlay.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case

FP32 = ("dt_bias", "B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_o")
"""What mamba-ssm 2.3.2.post1 creates in fp32 whatever `dtype` says; the last three with `is_mimo=True` only."""


# The cast


def _mamba3_on_cpu() -> Behaviour:
    try:
        mixer, what = _real_mamba3(dtype="bfloat16", device="cpu"), "mamba_ssm's Mamba3"
    except Blocked:
        mixer, what = _stand_in(32, 8, seed=1), "a module with the name and the fp32 parameters of mamba_ssm's Mamba3"
    before = _exempt(mixer)
    _wrap(mixer)
    broken, seen = _compare_bits(before, _exempt(mixer))
    return Behaviour(broken=broken, seen=f"{what}, wrapped in Float16Module: {seen}")


def _siso_on_gpu() -> Behaviour:
    return _mamba3_on_gpu()


def _mimo_on_gpu() -> Behaviour:
    return _mamba3_on_gpu(is_mimo=True, chunk_size=16)


def _mamba3_on_gpu(**options: Any) -> Behaviour:
    """Run a real Mamba-3 before and after it is wrapped: kept parameters give the same output and fp32 gradients."""
    import torch

    mixer = _real_mamba3(dtype="bfloat16", device="cuda", **options)
    _take_one_configuration()
    inputs = torch.randn(2, 256, mixer.d_model, generator=torch.Generator().manual_seed(3)).cuda().bfloat16()
    with torch.no_grad():
        expected = mixer(inputs)
    before = _exempt(mixer)
    _wrap(mixer)
    broken, seen = _compare_bits(before, _exempt(mixer))
    try:
        output = mixer(inputs)
        output.float().pow(2).mean().backward()
        torch.cuda.synchronize()
    except Exception as error:
        if not broken:
            raise  # with its parameters as it made them, a Mamba-3 that does not run is no finding of this case
        return Behaviour(broken=True, seen=f"{seen}; the wrapped module does not run: {_first_line(error)}")
    changed = float((output.detach().float() - expected.float()).abs().max())
    gradients = {name: value.grad for name, value in mixer.named_parameters() if name in before}
    usable = [
        name
        for name, gradient in gradients.items()
        if gradient is not None and gradient.dtype is torch.float32 and bool(torch.isfinite(gradient).all())
    ]
    seen += (
        f"; output changed by {changed:.1e} of {float(expected.abs().max()):.1e}"
        f"; finite fp32 gradients for {len(usable)} of {len(before)} parameters"
    )
    return Behaviour(broken=broken or len(usable) < len(before), seen=f"mamba_ssm's Mamba3 on the GPU: {seen}")


def _real_mamba3(*, dtype: str, device: str, **options: Any) -> Any:
    """Return mamba_ssm's own module, with the values of a trained one in its fp32 parameters.

    Raises:
        Blocked: this host cannot import it.
    """
    import torch

    cls, with_mimo = _import_mamba3()
    if options.get("is_mimo") and not with_mimo:
        raise Blocked("Mamba-3 MIMO needs tilelang")
    torch.manual_seed(1)
    mixer = cls(d_model=256, d_state=128, headdim=64, dtype=getattr(torch, dtype), device=device, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in _fp32_parameters(mixer).values():
            # A new Mamba-3 starts B_bias, C_bias and D at 1, which bf16 can hold. A trained value is not so lucky.
            value += 0.05 * torch.randn(value.shape, generator=generator).to(device)
    return mixer


def _import_mamba3() -> tuple[Any, bool]:
    """Return the class, and whether its MIMO kernels are there."""
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise Blocked("mamba-ssm is not installed")
    try:
        from mamba_ssm.modules import mamba3
    except ImportError:
        # The package imports transformers and compiled kernels of Mamba-1, which Mamba-3 does not use.
        for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]
        package = ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["mamba_ssm"] = package
        try:
            from mamba_ssm.modules import mamba3
        except ImportError as error:
            raise Blocked(f"mamba-ssm is installed but cannot be imported here: {error}") from error
    return mamba3.Mamba3, mamba3.mamba3_mimo_combined is not None


def _take_one_configuration() -> None:
    """Let each tuned kernel of Mamba-3 use one configuration: searching more than 200 takes longer than the rest.

    It decides how a kernel is laid out on the GPU, not what it computes. One stage, because more of them corrupt the
    output on some GPUs (state-spaces/mamba#997).
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("mamba_ssm.ops.triton"):
            continue
        for kernel in vars(module).values():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)  # a decorator around the tuner
            if len(getattr(kernel, "configs", ())) > 1:
                kernel.configs = [min(kernel.configs, key=_plainness)]


def _plainness(configuration: Any) -> tuple[int, int, bool, str]:
    """Return a key that is least for one stage, four warps, and no limit on registers."""
    limited = configuration.maxnreg is not None
    return configuration.num_stages, abs(configuration.num_warps - 4), limited, str(configuration.kwargs)


def _stand_in(hidden: int, heads: int, *, seed: int, device: str = "cpu") -> Any:
    """Return a block with the parameters of mamba-ssm's Mamba3 (MIMO), under its qualified name, and plain arithmetic.

    It maps [..., hidden] to [..., hidden].
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Any:
        """Return values around 1 with all the bits of an fp32 number."""
        return torch.nn.Parameter((1 + 0.25 * torch.rand(*shape, generator=generator)).to(device))

    class Mamba3(torch.nn.Module):  # type: ignore[misc] # torch is not seen by the type checker
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

        def forward(self, states: Any) -> Any:
            dt, x = self.in_proj(self.norm(states)).float().chunk(2, dim=-1)
            scale = (self.B_bias * self.C_bias).sum(dim=(1, 2)) + (self.mimo_x * self.mimo_z * self.mimo_o).sum(dim=1)
            y = torch.nn.functional.softplus(dt + self.dt_bias) * x * scale + self.D * x
            return states + self.out_proj(y.to(states.dtype))

    Mamba3.__module__, Mamba3.__qualname__ = "mamba_ssm.modules.mamba3", "Mamba3"
    return Mamba3().to(device)


def _wrap(model: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    config = SimpleNamespace(fp16=False, bf16=True, virtual_pipeline_model_parallel_size=None)
    return Float16Module(config, model)


def _fp32_parameters(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.named_parameters() if name.rpartition(".")[2] in FP32}


def _exempt(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in _fp32_parameters(model).items()}


def _compare_bits(before: dict[str, Any], after: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a value changed or a dtype did, and both in words."""
    changed = sum(int((value.double() != after[name].double()).sum()) for name, value in before.items())
    total = sum(value.numel() for value in before.values())
    cast = sorted(name for name, value in before.items() if after[name].dtype != value.dtype)
    dtypes = f"{len(cast)} of {len(before)} fp32 parameters cast" + (f" ({', '.join(cast)})" if cast else "")
    return bool(changed or cast), f"{changed} of {total} values changed, {dtypes}"


# Sharded state, without a GPU


def _state_names() -> Behaviour:
    """Ask for the sharded state of a bf16, an fp32 and a bf16 parameter after a step of a real AdamW.

    The constructor takes CUDA tensors only, so the instance is built without it; `state-names-gpu` goes all the way.
    """
    every, some = _misnamed(idle=0), _misnamed(idle=1)
    seen = f"every parameter trained: {every or 'all names right'}; the last one frozen so far: {some or 'all right'}"
    return Behaviour(broken=bool(every or some), seen=seen)


def _misnamed(*, idle: int) -> str:
    """Return how the sharded state is wrong, in words; empty when it is right."""
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    generator = torch.Generator().manual_seed(16)
    dtypes = {"first": torch.bfloat16, "native": torch.float32, "last": torch.bfloat16}
    model = {name: torch.nn.Parameter(torch.randn(3, generator=generator).to(dtype)) for name, dtype in dtypes.items()}
    main = {name: value if name == "native" else value.detach().clone().float() for name, value in model.items()}
    group = dict.fromkeys(("lr_mult", "wd_mult", "is_expert_parallel", "is_decoupled_lr", "default_config"), 1.0)
    inner = torch.optim.AdamW([{"params": list(main.values()), **group}], lr=0.1)
    for value in list(main.values())[: len(main) - idle]:
        value.grad = torch.randn(3, generator=generator)
    inner.step()
    optimizer = object.__new__(Float16OptimizerWithFloat16Params)
    vars(optimizer).update(
        optimizer=inner,
        config=SimpleNamespace(fp16=False, bf16=True),
        grad_scaler=None,
        init_state_fn=lambda *_: None,
        is_stub_optimizer=False,
        float16_groups=[[model["first"], model["last"]]],
        fp32_from_float16_groups=[[main["first"], main["last"]]],
        fp32_from_fp32_groups=[[main["native"]]],
    )
    sharded = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in model.items()}
    try:
        state = optimizer.sharded_state_dict(sharded)
    except (ValueError, KeyError, AssertionError) as error:
        return f"saving fails: {_first_line(error)}"
    saved = {entry.key: entry.data for entry in _entries(state["optimizer"]["state"])}
    saved |= {entry.key: entry.data for entry in _entries(state["fp32_from_fp16_params"])}
    right = {f"optimizer.state.fp32_param.{name}": main[name] for name in ("first", "last")}
    for name, value in main.items():
        right |= {
            f"optimizer.state.{key}.{name}": inner.state[value][key] for key in inner.state[value] if key != "step"
        }
    wrong = sorted(key for key in right.keys() | saved.keys() if saved.get(key) is not right.get(key))
    return f"{len(wrong)} of {len(right)} entries hold or lack another parameter's state ({wrong[0]})" if wrong else ""


# Checkpoints, the whole way


def _float16_checkpoint() -> Behaviour:
    return _checkpoint(distributed=False)


def _distributed_checkpoint() -> Behaviour:
    return _checkpoint(distributed=True)


def _checkpoint(*, distributed: bool) -> Behaviour:
    """Train a model with bf16 and fp32 parameters, hand its state to a fresh one through a checkpoint, and compare."""
    import torch
    from megatron.core import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            saved, fresh = _Training(1, distributed=distributed), _Training(11, distributed=distributed)
            losses = [saved.step(seed) for seed in range(3)]
            # As many steps on other data: DistributedOptimizer does not restore the step count of a torch Adam.
            for seed in range(90, 93):
                fresh.step(seed)
            what = f"{type(saved.innermost).__name__}, losses {', '.join(f'{loss:.4f}' for loss in losses)}"
            before, parameters = saved.states(), saved.values()
            try:
                through = _hand_over(saved, fresh, Path(folder) / "checkpoint")
            except Exception as error:  # noqa: BLE001 - however saving or loading fails is what is measured
                return Behaviour(broken=True, seen=f"{what}: no checkpoint: {_first_line(error)}")
            wrong = {
                "changed by saving": _differences(before, saved.states()),
                "lost by loading": _differences({**before, **parameters}, {**fresh.states(), **fresh.values()}),
            }
            saved.step(9), fresh.step(9)
            wrong["different after one more step"] = _differences(saved.values(), fresh.values())
        finally:
            torch.distributed.destroy_process_group()
    bad = [f"{len(names)} {how}, such as {names[0]}" for how, names in wrong.items() if names]
    seen = "; ".join(bad) or f"{len(before)} states and {len(parameters)} parameters bit-equal, and after one more step"
    return Behaviour(broken=bool(bad), seen=f"{what}: through {through}: {seen}")


class _Training:
    """A model with bf16 and fp32 parameters in Float16Module and DDP, with an optimizer of Megatron."""

    def __init__(self, seed: int, *, distributed: bool) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module, MegatronModule
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.distributed = distributed
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=2, bf16=True, params_dtype=torch.bfloat16
        )
        model = MegatronModule(config)
        # The embedding makes the bf16 grad buffer the first one, as in a real model.
        model.embedding = torch.nn.Linear(16, 32, bias=False)
        model.embedding.weight.data = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
        model.layers = torch.nn.Sequential(*(_stand_in(32, 8, seed=seed + number, device="cuda") for number in (0, 1)))
        model.forward = lambda inputs: model.layers(model.embedding(inputs))
        model.cuda()
        before = _exempt(model)
        self.inner = model
        wrapped = Float16Module(config, model)
        for name, value in _fp32_parameters(model).items():
            value.data = before[name].clone()  # whatever the cast did: this case needs both kinds
        self.model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=False, use_distributed_optimizer=distributed),
            module=wrapped,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        # What Megatron saves by default. Its other shardings do not load with torch's Adam, whatever the dtypes.
        self.metadata = {"distrib_optim_sharding_type": "dp_reshardable"} if distributed else None

    @property
    def parameters(self) -> dict[str, Any]:
        return {name.split("module.module.")[-1]: value for name, value in self.model.named_parameters()}

    @property
    def innermost(self) -> Any:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0]

    def values(self) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}

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
        """Return the main copy and Adam's moments of each parameter, paired without the index map in question."""
        optimizer = self.innermost
        if self.distributed:
            model = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
            main = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        else:
            model = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
            main = [*optimizer.fp32_from_float16_groups, *optimizer.fp32_from_fp32_groups]
        names = {id(value): name for name, value in self.parameters.items()}
        found: dict[str, Any] = {}
        for group, mains in zip(model, main, strict=True):
            for parameter, copied in zip(group, mains, strict=True):
                state = optimizer.optimizer.state[copied]
                tensors = {"main": copied, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
                name = names[id(parameter)]
                found |= {f"{name}.{key}": value.detach().clone() for key, value in tensors.items()}
        return found


def _hand_over(saved: _Training, fresh: _Training, folder: Path) -> str:
    """Move the sharded state of one run to another; return through what."""
    from megatron.core import dist_checkpointing

    if importlib.util.find_spec("psutil") is None:  # Megatron's writer needs it
        state = saved.sharded(is_loading=False)
        stored = {_identity(entry): _value(entry) for entry in _entries(state)}
        fresh.load(_read_back(fresh.sharded(is_loading=True), state, stored))
        return f"{len(stored)} entries by name"
    folder.mkdir()
    dist_checkpointing.save(saved.sharded(is_loading=False), str(folder))
    fresh.load(dist_checkpointing.load(fresh.sharded(is_loading=True), str(folder)))
    return f"{len(list(folder.iterdir()))} files"


def _identity(entry: Any) -> tuple[str, str]:
    return entry.key, str(getattr(entry, "global_offset", ""))


def _value(entry: Any) -> Any:
    return entry.data.detach().clone() if hasattr(entry.data, "detach") else copy.deepcopy(entry.data)


def _entries(state: Any) -> list[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    return [value for value in nested_values(state) if hasattr(value, "key")]


def _read_back(state: Any, saved: Any, stored: dict[tuple[str, str], Any]) -> Any:
    """Fill a sharded state as a checkpoint does: entries by name, local values as they are, the rest from `saved`."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(state, dict):
        return {key: _read_back(value, saved[key], stored) for key, value in state.items()}
    if isinstance(state, list):
        return [_read_back(value, other, stored) for value, other in zip(state, saved, strict=True)]
    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    return stored[_identity(state)] if hasattr(state, "key") else saved


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    import torch

    names = sorted(one.keys() | other.keys())
    both = one.keys() & other.keys()
    return [name for name in names if name not in both or not torch.equal(one[name], other[name])]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


_VERSIONS = ("megatron-core", "torch")
_ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _case(name: str, overlay: str, device: str, run: Callable[[], Behaviour], *versions: str) -> Case:
    return Case(
        name=name,
        overlay=overlay,
        device=device,
        versions=(*_VERSIONS, *versions),
        run=run,
        environment=_ONE_PROCESS,
    )


_MAMBA = ("mamba-ssm", "einops", "triton")
CASES = (
    _case("mamba3-cpu", "float16-fp32-exemption", "cpu", _mamba3_on_cpu, *_MAMBA),
    _case("mamba3-siso-gpu", "float16-fp32-exemption", "cuda", _siso_on_gpu, *_MAMBA),
    _case("mamba3-mimo-gpu", "float16-fp32-exemption", "cuda", _mimo_on_gpu, *_MAMBA, "tilelang"),
    _case("state-names-cpu", "float16-optimizer-state-ids", "cpu", _state_names),
    _case("state-names-gpu", "float16-optimizer-state-ids", "cuda", _float16_checkpoint, "psutil"),
    _case("distributed-gpu", "float16-distributed-order", "cuda", _distributed_checkpoint, "psutil"),
)
