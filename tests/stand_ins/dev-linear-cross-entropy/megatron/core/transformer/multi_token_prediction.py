"""Stand-in for `multi_token_prediction` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""

import torch


class _AlsoTrain(torch.autograd.Function):
    """Hands on hidden states, and trains a loss beside."""

    @staticmethod
    def forward(ctx, hidden_states, loss):
        ctx.shape = loss.shape
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx, slope):
        return slope, torch.ones(ctx.shape)


def process_mtp_loss(
    hidden_states,
    labels,
    loss_mask,
    output_layer,
    output_weight,
    runtime_gather_output,
    is_training,
    compute_language_model_loss,
    config,
    cp_group=None,
    tp_group=None,
    packed_seq_params=None,
    scale_logits_fn=None,
    input_ids=None,
    sequence_roll_context=None,
):
    """Train the heads, whose hidden states come behind those of the model, and return those of the model."""
    main, *heads = hidden_states.chunk(1 + config.mtp_num_layers)
    wanted = input_ids.roll(-1, 1) if labels is None else labels
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()
    for number in range(config.mtp_num_layers):
        wanted = wanted.roll(-1, 1)
        if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "linear":
            loss = output_layer(
                heads[number],
                weight=output_weight,
                runtime_gather_output=runtime_gather_output,
                output_cross_entropy_loss=True,
                labels=wanted,
            )
        else:
            scores, _ = output_layer(heads[number], weight=output_weight, runtime_gather_output=runtime_gather_output)
            scores = scores if scale_logits_fn is None else scale_logits_fn(scores)
            loss = compute_language_model_loss(wanted, scores)
        main = _AlsoTrain.apply(main, loss / loss.numel())
    return main
