"""Stand-in for `language_module` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""

import torch
from megatron.core.transformer.module import MegatronModule


class LanguageModule(MegatronModule):
    """What language models share."""

    def __init__(self, config, pg_collection=None):
        super().__init__(config=config)

    def compute_language_model_loss(self, labels, logits):
        """Return the loss of each label, as (batch, sequence)."""
        if not self.config.cross_entropy_loss_fusion or self.config.cross_entropy_fusion_impl == "native":
            loss = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
        return loss

    def _scale_logits(self, logits):
        return logits * self.config.mup_output_mult if self.config.use_mup else logits

    def shared_embedding_or_output_weight(self):
        """Return the one weight of embedding and output layer."""
        return self.embedding.word_embeddings.weight
