"""Train a tiny Llama for two steps with the Trainer of transformers and Liger's loss of each token, on one rank or several.

    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 proof/launchers/ranked_trainer.py

A script as a user could have written it: nothing in it knows of overlays. The model computes its loss itself, so it may be wrapped
for data parallelism. Data is made up from a seed, and nothing is downloaded.
"""

from __future__ import annotations

import tempfile

import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

WORDS, TOKENS = 32, 8
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Model(LlamaForCausalLM):
    """A Llama whose loss is the mean of Liger's losses of all tokens."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch: `input_ids` and `labels` are [b, s]."""
        hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1]  # [b, s - 1, d]
        per_token = LigerFusedLinearCrossEntropyLoss(reduction="none")(
            self.lm_head.weight, hidden.flatten(0, 1), labels[:, 1:].flatten()
        )
        return {"loss": per_token.mean()}


def main() -> None:
    """Train."""
    set_seed(1)
    tokens = torch.randint(WORDS, (8, TOKENS))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    model = Model(LlamaConfig(vocab_size=WORDS, max_position_embeddings=TOKENS, **SIZES))
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
        }
        Trainer(model=model, args=TrainingArguments(folder, **given), train_dataset=rows).train()


if __name__ == "__main__":
    main()
