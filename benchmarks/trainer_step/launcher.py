"""Tune a Llama on answers with the Trainer of transformers, and leave how long its steps take: a script as a user writes it.

    python benchmarks/trainer_step/launcher.py --log log.json --shares 1 [--no-liger]

Nothing in it knows of overlays. Of each row the first tokens are the prompt, whose labels do not count. One training for each
share of labelled tokens, each from the same weights; the model is made up, and so is its data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

IGNORED = -100
USED = 512
"""Tokens of the vocabulary that occur, so that something can be learned in a few steps."""
WARM_UP = 5
"""Steps that are not timed: kernels are compiled, and allocators fill."""
CUDA = torch.cuda.is_available()
LOSS_ALONE = {"rope": False, "rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": True}
"""Of Liger's kernels on a CPU: Triton's interpreter does not run the others."""


class Answers(Dataset):
    """Rows of tokens, each of which tells the next; the last `share` of them counts."""

    def __init__(self, share: float, rows: int, tokens: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        used = min(USED, vocabulary)
        follows = torch.randperm(used, generator=generator)
        row = [torch.randint(used, (rows,), generator=generator)]
        for _ in range(tokens - 1):
            row.append(follows[row[-1]])
        self._tokens = torch.stack(row, dim=1)  # [rows, tokens]
        prompt = tokens - round(share * tokens)
        self._labels = self._tokens.clone()
        self._labels[:, :prompt] = IGNORED

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


class Clock(TrainerCallback):
    """Milliseconds of each step, which is waited for."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self._began = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop."""
        self.steps.append((now() - self._began) * 1e3)


def now() -> float:
    """Return seconds, after the device has finished its work."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(share: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return losses, milliseconds of a step and of its loss alone, and the peak of memory in MiB."""
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 4),
        max_position_embeddings=args.tokens,
        pad_token_id=None,
    )
    with torch.device("cuda" if CUDA else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if CUDA and not args.master else torch.float32)
    clock = Clock()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            train_dataset=Answers(share, args.steps * args.rows, args.tokens, args.vocabulary, args.seed),
            callbacks=[clock],
            args=TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.rows,
                learning_rate=args.rate,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                bf16=CUDA,
                seed=args.seed,
                use_cpu=not CUDA,
                use_liger_kernel=args.liger,
                liger_kernel_config=None if CUDA else LOSS_ALONE,
            ),
        )
        trainer.train()
    timed = clock.steps[min(WARM_UP, len(clock.steps) - 1) :]
    return {
        "share": share,
        "step": statistics.median(timed),
        "fastest": min(timed),
        "peak": torch.cuda.max_memory_allocated() / 2**20 if CUDA else 0.0,
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "norms": [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each],
        "alone": alone(model, share, args),
    }


def alone(model: Any, share: float, args: argparse.Namespace) -> float:
    """Return the milliseconds of output layer and loss, forwards and backwards, as the model calls them."""
    data = Answers(share, args.rows, args.tokens, args.vocabulary, args.seed)
    weight = model.lm_head.weight
    labels = torch.stack([data[each]["labels"] for each in range(args.rows)]).to(weight.device)
    hidden = torch.randn(args.rows, args.tokens, args.hidden, device=weight.device, dtype=weight.dtype)
    count = (labels[:, 1:] != IGNORED).sum()
    times = []
    repeats = min(3 * WARM_UP, args.steps)
    for _ in range(repeats):
        given, weight.grad = hidden.detach().requires_grad_(), None
        began = now()
        if args.liger:
            from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

            loss = LigerForCausalLMLoss(
                hidden_states=given,
                lm_head_weight=weight,
                labels=labels,
                hidden_size=args.hidden,
                num_items_in_batch=count,
            )
        else:
            loss = model.loss_function(
                logits=given @ weight.t(), labels=labels, vocab_size=args.vocabulary, num_items_in_batch=count
            )
        loss.backward()
        times.append((now() - began) * 1e3)
    return statistics.median(times[repeats // 3 :])


def main() -> None:
    """Train with each share, and write the results."""
    parser = argparse.ArgumentParser(description="Tune a made-up Llama on made-up answers.")
    parser.add_argument("--log", type=Path, required=True, help="where to leave the results, as JSON")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0], help="of tokens that are labelled")
    parser.add_argument("--no-liger", dest="liger", action="store_false", help="the loss that transformers has itself")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4, help="of a batch")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--master", action="store_true", help="parameters in float32 under autocast, not in bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = [trained(share, args) for share in args.shares]
    args.log.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
