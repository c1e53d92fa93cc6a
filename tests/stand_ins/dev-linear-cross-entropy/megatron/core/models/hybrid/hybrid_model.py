"""Stand-in for `hybrid_model` of Megatron-LM dev: same names, signatures and behaviour, none of its code.

The shape since 2026-04-28: the output layer is a plain one, and the loss is always asked of logits. A layer, whatever
its letter, is a product and a tanh.
"""

from types import SimpleNamespace

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.multi_token_prediction import process_mtp_loss


def _config(**given):
    """Return the fields that the model reads."""
    fields = {
        "cross_entropy_loss_fusion": False,
        "cross_entropy_fusion_impl": "native",
        "mtp_num_layers": None,
        "mtp_detach_heads": False,
        "use_mup": False,
        "mup_output_mult": 1.0,
        "params_dtype": torch.float32,
    }
    return SimpleNamespace(**{**fields, **given})


class _Embedding(torch.nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(classes, width)

    def forward(self, input_ids, position_ids):
        return self.word_embeddings(input_ids).transpose(0, 1).contiguous()


class _Stack(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = hidden_states + torch.tanh(layer(hidden_states))
        return hidden_states


class HybridModel(LanguageModule, GraphableMegatronModule):
    """A language model of layers of several kinds."""

    def __init__(
        self,
        config,
        hybrid_stack_spec,
        vocab_size,
        max_sequence_length,
        hybrid_layer_pattern=None,
        hybrid_attention_ratio=None,
        hybrid_mlp_ratio=None,
        hybrid_override_pattern=None,
        pre_process=True,
        post_process=True,
        fp16_lm_cross_entropy=False,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
        rotary_percent=1.0,
        rotary_base=10000,
        scatter_embedding_sequence_parallel=True,
        seq_len_interpolation_factor=None,
        pg_collection=None,
        vp_stage=None,
    ):
        super().__init__(config, pg_collection)
        main, *heads = hybrid_layer_pattern.split("/")
        self.pre_process, self.post_process, self.mtp_process = pre_process, post_process, bool(heads)
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        if pre_process:
            self.embedding = _Embedding(vocab_size, config.hidden_size)
        self.decoder = _Stack(config.hidden_size, len(main))
        self.mtp = torch.nn.ModuleList(_Stack(config.hidden_size, len(head)) for head in heads)
        if post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=torch.nn.init.xavier_normal_,
                skip_weight_param_allocation=pre_process and share_embeddings_and_output_weights,
            )

    def forward(
        self,
        input_ids,
        position_ids,
        attention_mask,
        decoder_input=None,
        labels=None,
        inference_context=None,
        runtime_gather_output=None,
        *,
        inference_params=None,
        loss_mask=None,
        packed_seq_params=None,
        padding_mask=None,
    ):
        """Return the loss of each label, logits where there are no labels, or hidden states on an inner stage."""
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        hidden_states = self.decoder(hidden_states=decoder_input)
        for head in self.mtp if self.mtp_process else ():
            hidden_states = torch.cat([hidden_states, head(hidden_states[: input_ids.shape[1]])])
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.mtp_process:
            self._decoder_hidden_states_cache = hidden_states
            hidden_states = process_mtp_loss(
                hidden_states=hidden_states,
                labels=labels,
                loss_mask=loss_mask,
                output_layer=self.output_layer,
                output_weight=weight,
                runtime_gather_output=runtime_gather_output,
                is_training=self.training,
                compute_language_model_loss=self.compute_language_model_loss,
                config=self.config,
                scale_logits_fn=self._scale_logits if self.config.use_mup else None,
                input_ids=input_ids,
            )
        logits, _ = self.output_layer(hidden_states, weight=weight, runtime_gather_output=runtime_gather_output)
        logits = self._scale_logits(logits)
        if labels is None:
            return logits.transpose(0, 1)
        loss = self.compute_language_model_loss(labels, logits)
        return loss  # noqa: RET504 - as upstream writes it, which a probe reads
