"""Training steps of a row as a launcher of Megatron takes them, and the numbers that come of them."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from differential.host import adam
from differential.models import TOKENS, WORDS, built, configured, groups_of, places_of
from differential.rows import Packing, Row
from differential.shards import fill, gathered
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

BATCH = 2
RATE, SOFTNESS, CLIP = 0.5, 1.0, 1.0
"""Of Adam, whose first step is rate * g / (|g| + softness): with a softness of one it is smooth, and rounding stays rounding."""
BETAS = (0.9, 0.999)
SCALE = 256.0
"""Of a loss in half precision."""
BUCKET = 700
"""Elements of a gradient buffer at which a bucket ends: most parameters have more, and buckets have padding."""
Numbers = dict[str, torch.Tensor]


@contextlib.contextmanager
def groups_for(layout: tuple[int, ...]) -> Iterator[None]:
    """Have the default process groups of a layout. To make them takes longer than a row does."""
    tensor, pipeline, context, expert = layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1 if expert > 1 else None,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def batch(row: Row, number: int) -> dict[str, Any]:
    """Return this rank's part of a microbatch: words, labels, the loss mask, and how rows are packed or padded."""
    packing = row.packing
    tokens, rows = (sum(packing.places), 1) if packing else (TOKENS, BATCH)
    generator = torch.Generator().manual_seed(100 + number)
    words = torch.randint(0, WORDS, (rows, tokens + 1), generator=generator)
    found = {"words": words[:, :-1], "labels": words[:, 1:].clone(), "counts": torch.ones(rows, tokens)}
    device = torch.cuda.current_device()
    if packing:
        counted = torch.zeros(rows, tokens)
        for start, length in packing.documents:
            counted[:, start : start + length] = 1
        found["counts"] = counted
    if row.padding:
        mask = torch.stack([torch.arange(tokens) >= tokens - each for each in row.padding])
        found |= {"counts": (~mask).float(), "padding_mask": mask}
    packed = None if packing is None else _described(packing, device)
    mine = places_of(tokens, row.cp, parallel_state.get_context_parallel_rank(), packed).cpu()
    return {name: each[:, mine].contiguous().to(device) for name, each in found.items()} | {"packed": packed}


def _described(packing: Packing, device: Any) -> PackedSeqParams:
    bounds, padded = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
        for each in (packing.lengths, packing.places)
    )
    longest = max(packing.places)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded if packing.is_padded else None,
        cu_seqlens_kv_padded=padded if packing.is_padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **({"tokens_per_sample": longest} if packing.has_samples else {}),
    )


def alone(row: Row, number: int) -> Iterator[dict[str, Any]]:
    """Yield each document of a packed microbatch as a microbatch of its own, without its padding."""
    if row.packing is None:
        raise ValueError(f"the row {row.name!r} has no packing: its documents cannot be alone")
    whole = batch(row, number)
    for start, length in row.packing.documents:
        cut = {name: each[:, start : start + length] for name, each in whole.items() if name != "packed"}
        yield {**cut, "packed": None}


def taken(row: Row, model: Any, given: dict[str, Any]) -> torch.Tensor:
    """Run a model forwards over a microbatch."""
    tokens = given["words"].shape[1]
    places = torch.arange(tokens, device=given["words"].device).expand_as(given["words"])
    more = {"padding_mask": given["padding_mask"]} if "padding_mask" in given else {}
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=places.device).triu(1)
    found: torch.Tensor = model(
        given["words"],
        places,
        mask,
        labels=given["labels"],
        loss_mask=given["counts"],
        packed_seq_params=given["packed"],
        **more,
    )
    return found


class Chunk(torch.nn.Module):  # type: ignore[misc] # torch is not followed
    """A chunk of a model with one data parallel rank, without the process groups that Megatron's wrapper needs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module, self.config = model, model.config
        self.ddp_config = SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False)

    def forward(self, *given: Any, **named: Any) -> Any:
        """Call the model."""
        return self.module(*given, **named)

    def finish_grad_sync(self, **_: Any) -> None:
        """Do nothing: there is one rank."""

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        self.zero_grad()


class Algebra:
    """Adam as it is defined, over all weights of a model on one rank, with gradients clipped by their norm."""

    def __init__(self, model: Any) -> None:
        learning = [each for each in model.parameters() if each.requires_grad]
        self.moments = [(each, torch.zeros_like(each), torch.zeros_like(each)) for each in learning]
        self.group = {"lr": RATE, "betas": BETAS, "eps": SOFTNESS, "step": 0}

    @torch.no_grad()
    def learn(self) -> float:
        """Take a step, and return the norm."""
        norm = float(torch.stack([each.main_grad.square().sum() for each, _, _ in self.moments]).sum().sqrt())
        self.group["step"] += 1
        for each, mean, square in self.moments:
            adam(each.data, each.main_grad * min(1.0, CLIP / (norm + 1e-6)), mean.data, square.data, self.group)
        return norm


class Training:
    """A model of a row on this rank, wrapped and with an optimizer as launchers have them."""

    def __init__(self, row: Row, seed: int = 0) -> None:
        self.row, self.config = row, configured(row)
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        self.model = built(row, self.config, first, last)
        fill(self.model, seed)
        self.is_half = row.dtype in {"float16", "bfloat16"}
        self.wrapped = Chunk(self.model) if row.own_groups else self._replicated(seed)
        self.algebra = Algebra(self.model) if row.dtype == "float64" else None
        self.optimizer = None if row.own_groups else self._optimizer()
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = None if self.optimizer is None else self.optimizer.scale_loss
        self.losses: list[torch.Tensor] = []
        self.microbatches = 0

    def _replicated(self, seed: int) -> Any:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.is_half,
            use_distributed_optimizer=self.row.distributed,
            overlap_grad_reduce=self.row.distributed,
            bucket_size=BUCKET if self.row.distributed else None,
        )
        module = self.model
        if self.is_half:
            self.model.float()  # as modules are that make parameters in fp32 whatever the dtype of others is
            fill(self.model, seed)
            module = Float16Module(self.config, self.model)
        return DistributedDataParallel(config=self.config, ddp_config=settings, module=module)

    def _optimizer(self) -> Any:
        settings = OptimizerConfig(
            optimizer="adam",
            lr=RATE,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=SOFTNESS,
            weight_decay=0.0,
            clip_grad=CLIP,
            fp16=self.row.dtype == "float16",
            bf16=self.row.dtype == "bfloat16",
            initial_loss_scale=SCALE,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=self.row.distributed,
        )
        return get_megatron_optimizer(settings, [self.wrapped])

    def run(self, forward_only: bool = False) -> None:
        """Run all microbatches of a step forwards, and backwards."""
        row = self.row
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        numbers = range(0 if row.own_groups else rank, row.microbatches, 1 if row.own_groups else ranks)
        batches = [each for number in numbers for each in self._batches(number)]
        self.microbatches = len(batches)
        self.losses.clear()
        self.wrapped.zero_grad_buffer()
        if self.optimizer is None:
            self._run_by_hand(batches)
            return
        self.optimizer.zero_grad()
        tokens = sum(row.packing.places) if row.packing else TOKENS
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(batches),
            model=[self.wrapped],
            num_microbatches=len(batches),
            seq_length=tokens,
            micro_batch_size=1 if row.packing else BATCH,
            forward_only=forward_only,
        )

    def _run_by_hand(self, batches: list[dict[str, Any]]) -> None:
        """Run all microbatches in the model's own groups, which schedules of Megatron do not ask for."""
        for each in batches:
            total, tokens, _ = self._loss(taken(self.row, self.wrapped, each), each["counts"])
            (total / tokens / len(batches)).backward()
        finalize_model_grads([self.wrapped], pg_collection=groups_of(self.row))

    def _batches(self, number: int) -> Iterator[dict[str, Any]]:
        yield from alone(self.row, number) if self.row.documents_alone else [batch(self.row, number)]

    def _forward(self, batches: Iterator[dict[str, Any]], model: Any) -> Any:
        given = next(batches)
        return taken(self.row, model, given), lambda output: self._loss(output, given["counts"])

    def _loss(self, output: torch.Tensor, counts: torch.Tensor) -> Any:
        """Return the sum over the tokens of this rank, and their number, as Megatron-LM's own launchers do."""
        total = (output.float() * counts).sum()
        self.losses.append(torch.stack([total.detach().double(), counts.sum().double()]))
        return total, counts.sum().int(), {}

    def learn(self) -> float:
        """Take a step of the optimizer, and return the norm by which it clips."""
        if self.algebra is not None:
            return self.algebra.learn()
        if self.optimizer is None:
            return 0.0
        succeeded, norm, _ = self.optimizer.step()
        if not succeeded:
            raise RuntimeError("the optimizer skipped a step: a gradient is not finite")
        return float(norm)

    def resumed(self) -> Training:
        """Return another run that has loaded a checkpoint of this one."""
        folder: list[Any] = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
        torch.distributed.broadcast_object_list(folder)
        dist_checkpointing.save(self.sharded(is_loading=False), folder[0])
        other = Training(self.row, seed=1)
        found = dist_checkpointing.load(other.sharded(is_loading=True), folder[0])
        other.model.load_state_dict(found["model"])
        other.optimizer.load_state_dict(found["optimizer"])
        return other

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        """Return this rank's part of a checkpoint."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}


def step(row: Row) -> dict[str, Any]:
    """Take the steps of a row, and return the numbers of the last as whole tensors: on every rank the same."""
    model_parallel_cuda_manual_seed(7)
    get_moe_metrics_tracker()._metrics.clear()  # noqa: SLF001 - there is no other way to begin anew
    MTPLossLoggingHelper.tracker.clear()
    training = Training(row)
    if row.mode in {"eval", "no_grad"}:
        return {"numbers": _outputs(training), "apart": 0.0}
    if row.other is not None:
        _train(Training(row.other, seed=1), in_turn_with=training)
    for number in range(row.steps):
        if number and row.checkpoint:
            training = training.resumed()
        training.run()
        if number < row.steps - 1:
            training.learn()
            _logged(training)
    return _numbers(training)


def _train(other: Training, *, in_turn_with: Training) -> None:
    """Train another model of the process: before and between steps of the one that is measured."""
    other.run()
    in_turn_with.run()
    other.run()
    other.learn()
    _logged(other)


def _numbers(training: Training) -> dict[str, Any]:
    """Return the numbers of a step, and how far apart replicas are then."""
    left_out = training.row.left_out
    numbers: Numbers = {"loss": _loss_of_all(training.losses), **_logged(training)}
    scale = float(training.optimizer.get_loss_scale()) if training.row.dtype == "float16" else 1.0
    gradients, apart = gathered(training.model, lambda each: _gradient(each, scale))
    numbers |= {f"gradient of {name}": each for name, each in gradients.items()}
    numbers["gradient norm"] = torch.tensor(training.learn(), dtype=torch.float64)
    weights = _weights(training)
    steps, drift = gathered(training.model, lambda each: weights[id(each)], since=0)
    numbers |= {f"step of {name}": each for name, each in steps.items()}
    kept = {name: each for name, each in numbers.items() if not name.startswith(left_out)}
    return {"numbers": kept, "apart": drift if "gradient of" in left_out else max(apart, drift)}


def _gradient(each: torch.nn.Parameter, scale: float) -> torch.Tensor | None:
    found: torch.Tensor | None = getattr(each, "main_grad", each.grad)
    return None if found is None or not each.requires_grad else found / scale


def _weights(training: Training) -> dict[int, torch.Tensor]:
    """Return the tensor that the optimizer updates for each parameter, by the parameter's id: itself, or its float32 copy of all ranks."""
    if training.row.distributed:
        return {id(each): whole for one in _chained(training.optimizer) for each, whole in _joined(one)}
    return {id(each): getattr(each, "main_param", each).data for each in training.model.parameters()}


def _chained(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _joined(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter with the parts of all data parallel ranks, joined."""
    groups = [
        *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    ]
    mine = {id(one): shard for models, shards in groups for one, shard in zip(models, shards, strict=True)}
    for each in (one for buffer in optimizer.buffers for one in buffer.params):
        whole = torch.zeros(each.numel(), dtype=torch.float32, device=each.device)
        if id(each) in mine:
            place = optimizer._get_model_param_range_map(each)["param"]  # noqa: SLF001 - it has the range of each rank
            whole[place.start : place.end] = mine[id(each)].detach().flatten()
        torch.distributed.all_reduce(whole)
        yield each, whole.view(each.shape)


def _outputs(training: Training) -> Numbers:
    """Return losses without learning: of a model in `eval`, or of one that trains under `no_grad`."""
    if training.row.mode == "eval":
        training.wrapped.eval()
    with torch.no_grad():
        training.run(forward_only=True)
    return {"loss": _loss_of_all(training.losses), **_logged(training)}


def _loss_of_all(losses: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a token; stages of a pipeline but the last have none."""
    total = sum(losses, torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device()))
    torch.distributed.all_reduce(total)
    return (total[0] / total[1]).cpu()


def _logged(training: Training) -> Numbers:
    """Return the numbers that Megatron logs of a step, for a microbatch: auxiliary losses by layer, and losses of further predictions."""
    tracker = get_moe_metrics_tracker()
    sizes = _of_all_ranks({name: each.values.numel() for name, each in tracker.metrics.items()})
    for name in sorted(sizes):
        tracker.ensure_initialized(name, sizes[name])
    tracker._sync_metrics(sorted(sizes))  # noqa: SLF001 - the first step of `report`
    found = {name: tracker.metrics[name].values.double().cpu().clone() for name in sorted(sizes)}
    tracker.clear()
    MTPLossLoggingHelper.reduce_metrics_in_tracker()
    kept = MTPLossLoggingHelper.tracker.get("loss_values")
    found |= _of_all_ranks({} if kept is None else {"losses of predictions": kept.double().cpu().clone()})
    MTPLossLoggingHelper.clean_metrics_in_tracker()
    return {f"logged {name}": each / training.microbatches for name, each in found.items()}


def _of_all_ranks(found: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of all ranks by name; stages of a pipeline have different names."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found)
    return {name: each for rank in every for name, each in rank.items()}
