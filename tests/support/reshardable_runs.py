"""Ranks that train with Megatron's DistributedOptimizer and hand its state on through real, fully reshardable checkpoints.

Run by tests as `python reshardable_runs.py PLAN.json RANK`, one process for each rank: gloo on a CPU, NCCL on a GPU. Two parts
that a CPU lacks are made up. Megatron checks for CUDA tensors by their type and makes small ones: these are made on the CPU and
say that they are on CUDA. The inner optimizer is Adam in plain arithmetic under the name and with the contract of Apex's
FusedAdam: the state of torch's own Adam, which Megatron takes where there is no FusedAdam, cannot be loaded from this format.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

KEYS = ("param", "exp_avg", "exp_avg_sq")
SHAPES = ((61, 37), (45, 50), (9, 7), (70, 33), (31, 63), (64, 60))
"""Of the weights of linear layers, outputs first. None fills a bucket, and buckets end where their size is passed."""


def pretend_cuda() -> None:
    """Let CPU tensors say that they are on a GPU, and make tensors that are meant for a GPU on the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                return args[0]
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            found = function(*args, **kwargs)
            if function is torch.Tensor.type and isinstance(found, str):
                return found.replace("torch.", "torch.cuda.")
            return found

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda *_: None, synchronize=lambda: None)
    OnCpu().__enter__()


def install_adam() -> None:
    """Put an Adam where Megatron looks for Apex's: moments are state of a parameter, the step is one of its group."""
    import torch

    class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(
            self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, **others: Any
        ) -> None:
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": others["weight_decay"]})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                decay = 1 - group["lr"] * group["weight_decay"]
                first, second = (1 - beta ** group["step"] for beta in group["betas"])
                for each in group["params"]:
                    state = self.state[each]
                    if not state:
                        state.update({key: torch.zeros_like(each) for key in KEYS[1:]})
                    state["exp_avg"].lerp_(each.grad, 1 - group["betas"][0])
                    state["exp_avg_sq"].lerp_(each.grad.square(), 1 - group["betas"][1])
                    size = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
                    each.mul_(decay).addcdiv_(state["exp_avg"] / first, size, value=-group["lr"])

    made = {name: ModuleType(name) for name in ("apex", "apex.optimizers", "apex.multi_tensor_apply")}
    vars(made["apex"])["__path__"] = []
    vars(made["apex.optimizers"]).update(FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    vars(made["apex.multi_tensor_apply"])["multi_tensor_applier"] = None
    sys.modules.update(made)


def install_psutil() -> None:
    """Megatron's writer logs with psutil how much memory it holds."""
    try:
        import psutil  # noqa: F401
    except ImportError:
        made = ModuleType("psutil")
        vars(made)["Process"] = lambda *_: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0, uss=0))
        sys.modules["psutil"] = made


class Run:
    """A model in Float16Module and DDP with buckets, and Megatron's DistributedOptimizer around an Adam."""

    def __init__(
        self, seed: int, bucket: int, native: bool, device: str, vocabulary: int = 0, layers: int = len(SHAPES)
    ) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module, MegatronModule
        from megatron.core.transformer.transformer_config import TransformerConfig

        half = {"bf16": True, "params_dtype": torch.bfloat16}
        config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, **half)
        generator = torch.Generator().manual_seed(seed)
        self.model = MegatronModule(config)
        if vocabulary:
            self.model.embedding = self._embedding(vocabulary, config)
        for number, (outputs, inputs) in enumerate(SHAPES[:layers]):
            layer = torch.nn.Linear(inputs, outputs)
            layer.weight.data = torch.randn(outputs, inputs, generator=generator)
            layer.bias.data = torch.randn(outputs, generator=generator)
            setattr(self.model, f"layer{number}", layer)
        self.model.to(device)
        before = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        wrapped = Float16Module(config, self.model)
        if native:  # as float16-fp32-exemption leaves them: fp32 next to half precision
            for name, each in self.model.named_parameters():
                if name.startswith(("layer1", "layer4")):
                    each.data = before[name]
        self.ddp = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=bucket
            ),
            module=wrapped,
        )
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.01, clip_grad=0.0, use_distributed_optimizer=True, **half
        )
        self.whole = get_megatron_optimizer(settings, [self.ddp])
        self.optimizer = getattr(self.whole, "chained_optimizers", [self.whole])[0]

    @staticmethod
    def _embedding(vocabulary: int, config: Any) -> Any:
        """Return Megatron's embedding, which may be loaded from a checkpoint of another vocabulary."""
        import torch
        from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

        config.use_cpu_initialization = True
        return VocabParallelEmbedding(vocabulary, 32, init_method=torch.nn.init.normal_, config=config)

    def train(self, seed: int) -> None:
        """Take a step: the shards of this rank get gradients of their own, and every rank gets the new weights."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for group in self.optimizer.optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.randn(each.shape, generator=generator).to(each.device)
        self.optimizer.optimizer.step()
        self.optimizer._copy_main_params_to_model_params()
        self.ddp.start_param_sync(force_sync=True)

    def buckets(self) -> list[list[tuple[int, int]]]:
        """Return by grad buffer how long each bucket is, and how long without its padding."""
        return [[(one.grad_data.numel(), one.numel_unpadded) for one in each.buckets] for each in self.ddp.buffers]

    def pieces(self) -> dict[str, Any]:
        """Return the shards of this rank: by parameter its range, its weight, main copy and moments.

        Main copies are paired with parameters by the groups that were built, not by the index map of the optimizer.
        """
        built = self.optimizer
        pairs = [
            *zip(built.model_float16_groups, built.shard_fp32_from_float16_groups, strict=True),
            *zip(built.model_fp32_groups, built.shard_fp32_groups, strict=True),
        ]
        main = {id(one): copy for models, copies in pairs for one, copy in zip(models, copies, strict=True)}
        found = {}
        for name, each in self.model.named_parameters():
            if id(each) not in main:
                continue
            owned = built._get_model_param_range_map(each)["param"]
            state = built.optimizer.state[main[id(each)]]
            kept = {"param": main[id(each)], **{key: state[key] for key in KEYS[1:] if key in state}}
            kept["weight"] = each.detach().flatten()[owned.start : owned.end]
            found[name] = (owned.start, owned.end, {key: one.detach().cpu().clone() for key, one in kept.items()})
        return found

    def sharded(self, efficient: bool, is_loading: bool = False) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": efficient,
            "chained_optim_avoid_prefix": True,
        }
        model = self.model.sharded_state_dict()
        return {"model": model, "optimizer": self.whole.sharded_state_dict(model, is_loading, metadata=metadata)}


class Ranks:
    """The steps of a plan on one rank, and their results."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self.rank, self.device = rank, plan["device"]
        self.run: Any = None

    def overlays(self, off: list[str]) -> None:
        import megacpp_overlays

        megacpp_overlays.arm()
        for name in off:
            megacpp_overlays.undo(name)

    def build(
        self, seed: int, bucket: int, steps: int, native: bool = False, vocabulary: int = 0, layers: int = len(SHAPES)
    ) -> Any:
        from megatron.core import parallel_state

        self.run = Run(seed, bucket, native, self.device, vocabulary, layers)
        for number in range(steps):
            self.run.train(100 * seed + 10 * number + parallel_state.get_data_parallel_rank())
        return self.run.buckets()

    def zero_rows(self, start: int) -> None:
        """Make the embedding as if rows from `start` on were zeros from the beginning and no token had ever been one of them."""
        weight, built = self.run.model.embedding.weight, self.run.optimizer
        start = max(start - self.run.model.embedding.vocab_start_index, 0)
        pairs = zip(built.model_float16_groups, built.shard_fp32_from_float16_groups, strict=True)
        [main] = [copy for models, copies in pairs for one, copy in zip(models, copies, strict=True) if one is weight]
        weight.data[start:] = 0
        for each in (main, *(built.optimizer.state[main][key] for key in KEYS[1:])):
            each.view(-1, weight.shape[1])[start:] = 0

    def dump(self, to: str) -> None:
        import torch

        torch.save(self.run.pieces(), f"{to}.{self.rank}")

    def save(self, to: str, efficient: bool) -> None:
        import torch
        from megatron.core import dist_checkpointing

        if self.rank == 0:
            Path(to).mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(self.run.sharded(efficient), to)

    def save_shards(self, to: str, displaced: list[int | None]) -> None:
        """Save one parameter in shards, as ranks of tensor parallelism do, the state of each cut too far on by so much.

        The state of a shard that is displaced by None is zeros.
        """
        import torch
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        generator = torch.Generator().manual_seed(1)
        state = {}
        for number, ahead in enumerate(displaced):
            gathered = {key: torch.randn(700, generator=generator) for key in KEYS}
            shards = {
                f"optimizer.state.{key}.rows": torch.zeros(20, 30)
                if ahead is None
                else each[ahead : ahead + 600].view(20, 30)
                for key, each in gathered.items()
            }
            shards["rows"] = gathered["param"][:600].view(20, 30).bfloat16()
            for name, each in shards.items():
                whole = (0, number, len(displaced))
                state[f"{name}.{number}"] = ShardedTensor.from_rank_offsets(name, each.clone(), whole)
        Path(to).mkdir()
        dist_checkpointing.save(state, to)

    def load(self, source: str, efficient: bool, with_model: bool = True, new_rows: int | None = None) -> str:
        """Load the model and then its optimizer, as launchers do, or only the latter; return the error in words.

        Args:
            source: the checkpoint.
            efficient: how it is gathered.
            with_model: whether the model gets the weights that were read for it.
            new_rows: the first row of the vocabulary that is initialised in between.
        """
        import torch
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self.run.sharded(efficient, is_loading=True), source)
        if with_model:
            self.run.model.load_state_dict(state["model"])
        else:  # the checkpoint was read into the model
            for number, each in enumerate(self.run.model.parameters()):
                each.data.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(number)))
        if new_rows is not None:
            embedding = self.run.model.embedding
            torch.nn.init.normal_(embedding.weight.data[max(new_rows - embedding.vocab_start_index, 0) :])
        try:
            self.run.whole.load_state_dict(state["optimizer"])
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return ""


def main() -> None:
    warnings.simplefilter("ignore")
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    import torch

    import megacpp_overlays  # noqa: F401 - arms the overlays

    on_cpu = plan["device"] == "cpu"
    if on_cpu:
        pretend_cuda()
        torch.set_num_threads(1)
    install_adam()
    install_psutil()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan["size"]), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group(
        "gloo" if on_cpu else "nccl", init_method=f"file://{sys.argv[1]}.meeting", rank=rank, world_size=plan["size"]
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(plan["tensor_parallel"])
    ranks = Ranks(plan, rank)
    seen = [getattr(ranks, step.pop("do"))(**step) for step in plan["steps"]]
    torch.distributed.barrier()
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
