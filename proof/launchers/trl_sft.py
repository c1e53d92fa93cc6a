"""Tune a tiny Llama with the SFTTrainer of TRL and `use_liger_kernel=True`, and print the parts of its loss.

    python proof/launchers/trl_sft.py OUT [--fused]

A script as a user could have written it: nothing in it knows of overlays. Rows are tokens already, so no tokenizer is downloaded.
`--fused` asks TRL for Liger's fused linear cross entropy.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = 32
SPECIAL = dict(zip(("unk_token", "eos_token", "pad_token"), ("w0", "w1", "w2"), strict=True))


def main(folder: str, *, fused: bool) -> None:
    """Train for two steps."""
    words = {f"w{number}": number for number in range(WORDS)}
    tokens = Tokenizer(models.WordLevel(words, unk_token=SPECIAL["unk_token"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **SPECIAL)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, **SIZES))
    rows = Dataset.from_dict({"input_ids": [[3 + (at + row) % 20 for at in range(16)] for row in range(8)]})
    layers = dict.fromkeys(
        ("rope", "rms_norm", "swiglu"), False
    )  # their kernels ask for a GPU; the loss is the question
    liger: dict[str, Any] = {**layers, **({"fused_linear_cross_entropy": True} if fused else {})}
    config = SFTConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        use_liger_kernel=True,
        liger_kernel_config=liger,
        gradient_checkpointing=False,
    )
    SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer).train()


if __name__ == "__main__":
    main(sys.argv[1], fused="--fused" in sys.argv)
