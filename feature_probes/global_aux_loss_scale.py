"""The gradient of Megatron's balancing loss over the global batch, which is divided by the number of data parallel ranks twice.

The loss of a rank is its share: its own probabilities over the tokens of all data parallel ranks. Shares add up to the loss, and gradients of
data parallel ranks are averaged. The seam relies on scores that reach nothing but that loss, and on a loss that reaches nothing but the log and
the gradient.

Source: https://github.com/NVIDIA/Megatron-LM/issues/3672
"""

from __future__ import annotations

import ast

from megacpp_overlays.feature_probes.findings import absent, at, broken, unknown
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.definitions import binders, plain_class, plain_function, words
from megacpp_overlays.source.patterns import Match, Pattern
from megacpp_overlays.source.trees import ModuleSource, SourceTree

ROUTER = "TopKRouter"
METHOD, ATTACHED = f"{ROUTER}._apply_global_aux_loss", f"{ROUTER}.attach_and_log_load_balancing_loss"
COEFFICIENT = f"{ROUTER}.get_aux_loss_coeff"
TARGET = Target(distribution="megatron-core", module="megatron.core.transformer.moe.router", symbol=METHOD)
UTILS, LOSS = "megatron.core.transformer.moe.moe_utils", "switch_load_balancing_loss_func"
DIVIDED = "divided-twice"

_BEGIN = """
def _apply_global_aux_loss($$_):
    $coeff = self.get_aux_loss_coeff("global_aux_loss")
    if $coeff == 0:
        return probs
"""
_SUM = """
    self.global_tokens_per_expert += $counted
    self.ga_steps += 1
    $averaged = self.global_tokens_per_expert / self.ga_steps
"""
_END = """
    $loss = switch_load_balancing_loss_func(
        probs=scores_for_aux_loss, tokens_per_expert=$averaged, total_num_tokens=$total, topk=self.topk,
        num_experts=self.config.num_moe_experts, moe_aux_loss_coeff=$coeff, fused=self.config.moe_router_fusion,
    )
    probs = self.attach_and_log_load_balancing_loss(
        probs, $coeff, $loss, "global_load_balancing_loss", self.tp_dp_cp_group, $$more
    )
    return probs
"""
_COUNTED = """
    $counted, $local, $total = get_tokens_per_expert_and_token_count(
        routing_map=routing_map, reduce_group=self.tp_dp_cp_group, with_padding_mask=with_padding_mask, topk=self.topk
    )
"""
_METHODS = (
    Pattern(_BEGIN + _COUNTED + _SUM + _END),
    Pattern(
        f"""{_BEGIN}
    $counted = routing_map.sum(dim=0)
    $counted = reduce_from_tensor_model_parallel_region($counted, self.tp_dp_cp_group)
{_SUM}
    $local = scores_for_aux_loss.shape[0]
    $total = $local * self.tp_dp_cp_group.size()
{_END}"""
    ),
)
_MORE = {"reduce_group_has_dp=True", "needs_dp_avg=False", "aux_loss_scale_reduce_groups=(self.tp_cp_group,)"}
_GIVEN = Pattern("MoEAuxLossAutoScaler.apply(activation, $given)")
_FACTORS = {
    "",
    " * activation.shape[0]",
    " * num_tokens",
    " * num_local_tokens * self.tp_cp_group.size()",
    " * aux_loss_scale_num_tokens",
}
"""By what a loss is multiplied for a gradient: the tokens of ranks that share a batch, where losses are taken for each token."""
_FOR_PREDICTIONS = Pattern("aux_loss = aux_loss / self.config.mtp_num_layers")
_SCALED = Pattern("""
aux_loss = torch.sum($probs * tokens_per_expert) * (num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens))
""")
_OF_RANKS = {"tp_dp_cp_group", "dp_group", "dp_cp_group", "size", "get_data_parallel_world_size", "data_parallel_size"}


def probe(tree: SourceTree) -> Finding:
    """Return whether gradients of the loss over the global batch are a share of a share."""
    source, utils = tree.module(TARGET.module), tree.module(UTILS)
    if source is None or plain_class(source, ROUTER) is None:
        return absent(f"there is no {TARGET.module}.{ROUTER}", source)
    method, attached, coefficient = (plain_function(source, each) for each in (METHOD, ATTACHED, COEFFICIENT))
    if method is None:
        return absent(f"{ROUTER} has no loss over the global batch", source)
    if attached is None or coefficient is None or utils is None:
        raise unknown(
            source, method, "the loss over the global batch has its coefficient, or its gradient, from elsewhere"
        )
    loss = plain_function(utils, LOSS)
    if loss is None or len(binders(loss, "aux_loss")) != 1 or not any(_SCALED.find(loss)):
        raise unknown(source, method, f"{LOSS} divides by other than the square of all tokens")
    found = next(filter(None, (each.match(method) for each in _METHODS)), None)
    if found is None or not _more(found) <= _MORE | {f"valid_token_count={found.text('local')}"}:
        raise unknown(source, method, "the loss over the global batch is computed otherwise")
    _check_gradient(source, attached)
    if words(coefficient) & _OF_RANKS:
        raise unknown(source, coefficient, "coefficients depend on ranks")
    seen = "a share of the loss over all data parallel ranks has its gradient averaged over them"
    return broken(DIVIDED, at(source, found["loss"], seen))


def _more(found: Match) -> set[str]:
    """Return further arguments of what attaches the loss."""
    return {
        f"{each.arg}={ast.unparse(each.value)}" if isinstance(each, ast.keyword) else "" for each in found.many("more")
    }


def _check_gradient(source: ModuleSource, attached: ast.FunctionDef) -> None:
    """Raise SourceError where the gradient of a loss is multiplied by other than tokens, or divided by other than predictions."""
    given = {each.text("given") for each in _GIVEN.find(attached)}
    bound = [each for each in binders(attached, "aux_loss") if not isinstance(each, ast.arg)]
    divided = sum(1 for _ in _FOR_PREDICTIONS.find(attached))
    if not given or not given <= {f"aux_loss{each}" for each in _FACTORS} or len(bound) != divided:
        raise unknown(source, attached, "gradients of balancing losses are scaled otherwise")
    if words(attached) & (_OF_RANKS - {"size"}):
        raise unknown(source, attached, "gradients of balancing losses depend on data parallel ranks")
