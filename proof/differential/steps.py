"""A training step of a row as a launcher of Megatron takes it, and the numbers that come of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from differential.models import TOKENS, WORDS, built, configured, places_of
from differential.rows import Packing, Row
from differential.shards import fill, gathered
from megatron.core import parallel_state
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
"""Of Adam's first step, rate * g / (|g| + softness): with a softness of one it is smooth, and rounding stays rounding."""
Numbers = dict[str, torch.Tensor]
SCALE = 256.0
"""Of a loss in half precision."""


@contextlib.contextmanager
def parallel(row: Row) -> Iterator[None]:
    """Have the default process groups of a row."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        context_parallel_size=row.cp,
        expert_model_parallel_size=row.ep,
        expert_tensor_parallel_size=1 if row.ep > 1 else None,
    )
    model_parallel_cuda_manual_seed(7)
    get_moe_metrics_tracker()._metrics.clear()  # noqa: SLF001 - there is no other way to begin anew
    MTPLossLoggingHelper.tracker.clear()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def batch(row: Row, number: int) -> dict[str, Any]:
    """Return a microbatch: words, labels, what counts, and how rows are packed or padded; what this rank has of it."""
    packing = row.packing
    tokens, rows = (sum(packing.places), 1) if packing else (TOKENS, BATCH)
    generator = torch.Generator().manual_seed(100 + number)
    words = torch.randint(0, WORDS, (rows, tokens + 1), generator=generator)
    found = {"words": words[:, :-1], "labels": words[:, 1:].clone(), "counts": torch.ones(rows, tokens)}
    device = torch.cuda.current_device()
    if packing:
        starts = [0, *itertools.accumulate(packing.places)]
        counted = torch.zeros(rows, tokens)
        for start, length in zip(starts, packing.lengths, strict=False):
            counted[:, start : start + length] = 1
        found["counts"] = counted
    if row.padding:
        mask = torch.stack([torch.arange(tokens) >= tokens - each for each in row.padding])
        found |= {"counts": (~mask).float(), "padding_mask": mask}
    packed = None if packing is None else _described(packing, device)
    mine = places_of(tokens, row.cp, parallel_state.get_context_parallel_rank(), None if packed is None else packed)
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
    )


def alone(row: Row, number: int) -> Iterator[dict[str, Any]]:
    """Yield each document of a packed microbatch as a microbatch of its own, without its padding."""
    packing = row.packing
    assert packing is not None
    whole = batch(row, number)
    for start, length in zip([0, *itertools.accumulate(packing.places)], packing.lengths, strict=False):
        cut = {name: each[:, start : start + length] for name, each in whole.items() if name != "packed"}
        yield {**cut, "packed": None}


def taken(row: Row, model: Any, given: dict[str, Any]) -> torch.Tensor:
    """Run a model forwards over a microbatch."""
    tokens = given["words"].shape[1]
    places = torch.arange(tokens, device=given["words"].device).expand_as(given["words"])
    more = {"padding_mask": given["padding_mask"]} if "padding_mask" in given else {}
    if row.model == "hybrid":
        assert not more, "HybridModel takes no padding mask"
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


class Training:
    """A model of a row on this rank, wrapped and with an optimizer as launchers have them."""

    def __init__(self, row: Row, seed: int = 0) -> None:
        self.row, self.config = row, configured(row)
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        self.model = built(row, self.config, first, last)
        fill(self.model, seed)
        half = row.dtype in {"float16", "bfloat16"}
        module = Float16Module(self.config, self.model) if half else self.model
        is_distributed = row.optimizer == "distributed"
        self.ddp = DistributedDataParallel(
            config=self.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=half, use_distributed_optimizer=is_distributed, overlap_grad_reduce=False
            ),
            module=module,
        )
        self.ddp.broadcast_params()
        settings = OptimizerConfig(
            optimizer="adam",
            lr=RATE,
            adam_eps=SOFTNESS,
            weight_decay=0.0,
            clip_grad=CLIP,
            fp16=row.dtype == "float16",
            bf16=row.dtype == "bfloat16",
            initial_loss_scale=SCALE,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=is_distributed,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.ddp])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.losses: list[torch.Tensor] = []
        self.microbatches = 0

    def run(self, forward_only: bool = False) -> None:
        """Run all microbatches of a step forwards, and backwards."""
        row = self.row
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        numbers = range(rank, row.microbatches, ranks)
        batches = [each for number in numbers for each in self._batches(number)]
        self.microbatches = len(batches)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.losses.clear()
        tokens = sum(row.packing.places) if row.packing else TOKENS
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(batches),
            model=[self.ddp],
            num_microbatches=len(batches),
            seq_length=tokens,
            micro_batch_size=1 if row.packing else BATCH,
            forward_only=forward_only,
        )

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


def step(row: Row) -> dict[str, Any]:
    """Take a training step of a row, and return its numbers as whole tensors: on every rank the same."""
    with parallel(row):
        training = Training(row)
        if row.mode in {"eval", "no_grad"}:
            return {"numbers": _outputs(training), "apart": 0.0}
        if row.other is not None:
            _train(Training(row.other, seed=1), in_turn_with=training)
        training.run()
        return _numbers(training)


def _train(other: Training, *, in_turn_with: Training) -> None:
    """Train another model of the process: before and between steps of the one that is measured."""
    other.run()
    in_turn_with.run()
    other.run()
    other.optimizer.step()
    _logged(other)


def _numbers(training: Training) -> dict[str, Any]:
    row = training.row
    numbers: Numbers = {"loss": _loss_of_all(training.losses), **_logged(training)}
    scale = float(training.optimizer.get_loss_scale()) if row.dtype == "float16" else 1.0
    apart = 0.0
    if row.optimizer != "distributed":
        gradients, apart = gathered(training.model, lambda each: _gradient(each, scale))
        numbers |= {f"gradient of {name}": each for name, each in gradients.items()}
    if row.dtype == "float64":
        return {"numbers": {**numbers, **_by_algebra(gradients)}, "apart": apart}
    succeeded, norm, _ = training.optimizer.step()
    assert succeeded, "the optimizer skipped a step"
    numbers["gradient norm"] = torch.tensor(float(norm), dtype=torch.float64)
    steps, drift = gathered(training.model, _weight, since=0)
    numbers |= {f"step of {name}": each for name, each in steps.items()}
    return {"numbers": numbers, "apart": max(apart, drift)}


def _weight(each: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter, or the float32 copy of it that an optimizer steps."""
    main: torch.Tensor | None = getattr(each, "main_param", None)
    return each.data if main is None or main.shape != each.shape else main.data


def _by_algebra(gradients: dict[str, torch.Tensor]) -> Numbers:
    """Return the norm of whole gradients, and the first step of Adam with these, clipped."""
    norm = torch.stack([each.square().sum() for each in gradients.values()]).sum().sqrt()
    clipped = {name: each * min(1.0, CLIP / (float(norm) + 1e-6)) for name, each in gradients.items()}
    steps = {f"step of {name}": -RATE * each / (each.abs() + SOFTNESS) for name, each in clipped.items()}
    return {"gradient norm": norm, **steps}


def _gradient(each: torch.nn.Parameter, scale: float) -> torch.Tensor | None:
    found = getattr(each, "main_grad", None)
    return None if found is None or not each.requires_grad else found / scale


def _outputs(training: Training) -> Numbers:
    """Return the losses of tokens without learning: of a model in `eval`, or that trains under `no_grad`."""
    if training.row.mode == "eval":
        training.ddp.eval()
    with torch.no_grad():
        training.run(forward_only=True)
    return {"loss": _loss_of_all(training.losses), **_logged(training)}


def _loss_of_all(losses: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a token; stages of a pipeline but the last have none."""
    total = sum(losses, torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device()))
    torch.distributed.all_reduce(total)
    return (total[0] / total[1]).cpu()


def _logged(training: Training) -> Numbers:
    """Return what Megatron logs of a step, for a microbatch: auxiliary losses by layer, and losses of further predictions."""
    tracker = get_moe_metrics_tracker()
    sizes = _of_all_ranks({name: each.values.numel() for name, each in tracker.metrics.items()})
    for name in sorted(sizes):
        tracker.ensure_initialized(name, sizes[name])
    tracker._sync_metrics(sorted(sizes))  # noqa: SLF001 - what `report` begins with
    found = {name: tracker.metrics[name].values.double().cpu().clone() for name in sorted(sizes)}
    tracker.clear()
    MTPLossLoggingHelper.reduce_metrics_in_tracker()
    kept = MTPLossLoggingHelper.tracker.get("loss_values")
    found |= _of_all_ranks({} if kept is None else {"losses of predictions": kept.double().cpu().clone()})
    MTPLossLoggingHelper.clean_metrics_in_tracker()
    if not training.row.logs:
        return {}
    return {f"logged {name}": each / training.microbatches for name, each in found.items()}


def _of_all_ranks(found: dict[str, Any]) -> dict[str, Any]:
    """Return what any rank has by name; stages of a pipeline have different names."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found)
    return {name: each for rank in every for name, each in rank.items()}
