"""The Trainer of transformers and a mixture of experts: does its balancing loss weigh the same over microbatches and ranks?

A small model takes one step over rows of equally many tokens, each a microbatch, on one rank or on two that are forked and meet with gloo. Gradients of the routers are compared
with those of the same model without a Trainer: of the mean over all tokens, and of the mean of the microbatches' balancing losses.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, on_ranks

OVERLAY = "trainer-moe-aux-loss"
TOKENS, VOCABULARY, COEFFICIENT = 16, 32, 1.0
ROWS = tuple([3 + (row * 7 + place * (row + 1)) % (VOCABULARY - 3) for place in range(TOKENS)] for row in range(4))
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}
EXPERTS: Mapping[str, Any] = {
    "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT,
}
TOLERANCE = 1e-3
"""Of a gradient in float32, relative, in Frobenius norms."""


def _run(ranks: int, microbatches: int) -> Behaviour:
    import torch

    found, right = (torch.tensor(over(ranks, microbatches)[name]) for name in ("routers", "right"))
    far, times = float((found - right).norm() / right.norm()), float(found.norm() / right.norm())
    return Behaviour(
        broken=far > TOLERANCE,
        seen=f"{ranks} data parallel ranks, {microbatches} microbatches on each: gradients of routers are {far:.1e} off, and {times:.2f} times as long",
    )


def over(ranks: int, microbatches: int, run: Any = None, **asked: Any) -> dict[str, list[float]]:
    """Return what `trained` returns on the first of so many ranks, and gradients of routers that are right; processes are forked, one rank has one as well.

    Args:
        ranks: all of them, data parallel.
        microbatches: of each rank, one row each.
        run: takes the place of `trained`.
        asked: see `trained`.
    """
    library()
    found = on_ranks(ranks, functools.partial(_on_rank, ranks, microbatches, run or trained, asked))
    first = "rank 0, "
    return {name.removeprefix(first): each for name, each in found.items() if name.startswith(first)}


def _on_rank(ranks: int, microbatches: int, run: Any, asked: Mapping[str, Any], rank: int) -> Mapping[str, object]:
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # accelerate wants them; ranks have met
    found = run(microbatches, ranks=ranks, **asked)
    return {**found, **({} if asked else {"right": expected(ranks * microbatches)})}


def trained(microbatches: int, *, ranks: int = 1, evaluate: bool = False, **asked: Any) -> dict[str, Any]:
    """Take one step of a Trainer, and return gradients of routers, norms of others, and losses that it logs.

    Args:
        microbatches: of each rank, one row each.
        ranks: all of them, data parallel.
        evaluate: evaluate before the step.
        asked: arguments of TrainingArguments; `trainer`, a class to train with; `compute_loss_func`; and `model_` before the names of `model`'s arguments.
    """
    import torch

    transformers: Any = library()
    of_model = {name.removeprefix("model_"): asked.pop(name) for name in list(asked) if name.startswith("model_")}
    of_trainer = {name: asked.pop(name) for name in ("compute_loss_func",) if name in asked}
    kind = asked.pop("trainer", transformers.Trainer)
    gradients: dict[str, Any] = {}

    class Keep(transformers.TrainerCallback):  # type: ignore[misc] # of a module that is found at run time
        """Keeps gradients as the optimizer gets them."""

        def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
            gradients.update(_learnt(given["model"]))

    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": microbatches, "max_steps": 1,
            "max_grad_norm": 0.0, "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1,
            "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.0, "per_device_eval_batch_size": 1,
        }
        data = _rows(ranks * microbatches)
        trainer = kind(
            model(**of_model),
            transformers.TrainingArguments(folder, **arguments | asked),
            train_dataset=data,
            eval_dataset=data,
            data_collator=_collated,
            callbacks=[Keep()],
            **of_trainer,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        losses = {"evaluated": trainer.evaluate()["eval_loss"]} if evaluate else {}
        trainer.train()
    losses["logged"] = next(each["loss"] for each in trainer.state.log_history if "loss" in each)
    return {**gradients, **{name: torch.tensor(each) for name, each in losses.items()}}


def expected(rows: int) -> Any:
    """Return the gradients of routers without a Trainer."""
    import torch

    whole = model()
    for row in _rows(rows):
        batch = _collated([row])
        found = whole(input_ids=batch["input_ids"])
        logits, labels = found.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.float(), labels) + COEFFICIENT * found.aux_loss
        (loss / rows).backward()
    return _learnt(whole)["routers"]


def _rows(count: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": row, "labels": row} for row in ROWS[:count]]


def _collated(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def _learnt(model: Any) -> dict[str, Any]:
    import torch

    learnt = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    routers = [each.flatten() for name, each in learnt.items() if name.endswith("gate.weight")]
    others = [each.norm() for name, each in learnt.items() if not name.endswith("gate.weight")]
    found = {"others": torch.stack(others)}
    return found | ({"routers": torch.cat(routers)} if routers else {})


def model(kind: str = "Qwen3Moe", **asked: Any) -> Any:
    """Return a small model for causal language modelling, the same each time.

    Args:
        kind: the name of a model of transformers.
        asked: fields of its configuration.
    """
    import torch

    transformers = library()
    sizes = {**SIZES, **(EXPERTS if kind == "Qwen3Moe" else {}), **asked}
    with torch.random.fork_rng([]):
        torch.manual_seed(65)
        return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


@functools.cache
def library() -> Any:
    """Return transformers, with the module of the Trainer.

    Raises:
        TargetAbsent: transformers is not installed.
        Blocked: what its Trainer needs is not.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"transformers cannot be imported: {error}") from error
    try:
        importlib.import_module("accelerate")
        importlib.import_module("transformers.trainer")
    except ImportError as error:
        raise Blocked(f"the Trainer of transformers needs more: {error}") from error
    return transformers


QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_case = functools.partial(
    Case, overlay=OVERLAY, device="cpu", versions=("transformers", "accelerate", "torch"), environment=QUIET
)
CASES = (
    _case(name="microbatches-cpu", run=functools.partial(_run, 1, 4)),
    _case(name="ranks-cpu", run=functools.partial(_run, 2, 1)),
    _case(name="microbatches-on-ranks-cpu", run=functools.partial(_run, 2, 2)),
)
