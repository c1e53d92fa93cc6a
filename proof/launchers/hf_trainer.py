"""Train a Llama from `LlamaConfig` with the Trainer of transformers and a weight for each token of the loss.

    TRITON_INTERPRET=1 python proof/launchers/hf_trainer.py --log log.json      on a CPU; on a GPU without the variable

A script as a user could have written it: nothing in it knows of overlays, and no proof edits it. `--loss liger` takes the
fused linear cross entropy of liger-kernel with `reduction="none"`, `--loss torch` what PyTorch has for the same. Data is made
up from a seed, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

IGNORED = -100


class Answers(Dataset):
    """Rows of tokens, each of which tells the next. Labels and weights say which of them count, and how much.

    `prompts`: a row begins with tokens that do not count, as in tuning on answers. `weights`: every token counts, some more.
    """

    def __init__(self, kind: str, rows: int, tokens: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        follows = torch.randperm(vocabulary, generator=generator)
        row = [torch.randint(vocabulary, (rows,), generator=generator)]
        for _ in range(tokens - 1):
            row.append(follows[row[-1]])
        self._tokens = torch.stack(row, dim=1)  # [rows, tokens]
        if kind == "prompts":
            lengths = torch.randint(2, tokens // 2, (rows, 1), generator=generator)
            self._weights = (torch.arange(tokens) >= lengths).float()
        else:
            self._weights = torch.rand((rows, tokens), generator=generator) + 0.1
        self._labels = self._tokens.masked_fill(self._weights == 0, IGNORED)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index], "weights": self._weights[index]}


class WeightedTrainer(Trainer):
    """Trainer whose loss is the weighted mean of a loss for each token."""

    def __init__(self, *args: Any, per_token: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._per_token = per_token

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch: `input_ids`, `labels` and `weights` are [b, s]."""
        hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state[:, :-1]  # [b, s - 1, d]
        labels, weights = inputs["labels"][:, 1:].flatten(), inputs["weights"][:, 1:].flatten()
        per_token = self._per_token(model.lm_head.weight, hidden.flatten(0, 1), labels)
        loss = (per_token * weights).sum() / weights.sum()
        return (loss, {}) if return_outputs else loss


def liger_loss() -> Any:
    """Return Liger's loss of each token; it never has all logits at once."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="none")


def torch_loss() -> Any:
    """Return PyTorch's loss of each token."""

    def per_token(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = (hidden @ weight.t()).float()  # as transformers' own loss takes them
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")

    return per_token


def main() -> None:
    """Train, and write what the Trainer logged."""
    args = parse_arguments()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.tokens,
        pad_token_id=None,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    with tempfile.TemporaryDirectory() as folder:
        trainer = WeightedTrainer(
            model=model,
            per_token=liger_loss() if args.loss == "liger" else torch_loss(),
            train_dataset=Answers(args.data, args.steps * args.rows, args.tokens, args.vocabulary, args.seed),
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
                remove_unused_columns=False,
                seed=args.seed,
                use_cpu=not torch.cuda.is_available(),
            ),
        )
        trainer.train()
    args.log.write_text(json.dumps(trainer.state.log_history, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a Llama with a weight for each token of the loss.")
    parser.add_argument("--loss", choices=("liger", "torch"), default="liger")
    parser.add_argument("--data", choices=("prompts", "weights"), default="prompts")
    parser.add_argument("--log", type=Path, required=True, help="where to leave what the Trainer logged, as JSON")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=4, help="of a batch")
    parser.add_argument("--tokens", type=int, default=16, help="of a row")
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
