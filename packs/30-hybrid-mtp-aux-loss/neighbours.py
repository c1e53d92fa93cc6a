"""Routers whose MoE losses are right without the overlays: of the decoder, of a prediction that has a layer of its own, with another loss, and
in evaluation; and the logged z-loss."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside, on_ranks

PACK = beside(__file__)
HYBRID, Z_LOSS = "hybrid-mtp-aux-loss", "mtp-z-loss"


def _routed(
    overlay: str, *, predicts: bool, trains: bool = True, logged: bool = True, learnt: bool = True, **settings: Any
) -> Mapping[str, object]:
    """Return what a router computes of the same tokens twice, what it learns, and the losses that it logs.

    Args:
        overlay: a hybrid stack makes the router, or it is made alone for the z-loss.
        predicts: whether it is for multi-token prediction.
        trains: whether it is in training.
        logged: whether logs are right without the overlay.
        learnt: whether gradients are right without it.
        settings: of the model.
    """
    _prepare(PACK.STACK if overlay == HYBRID else PACK.ROUTER)

    def run(_: int) -> Mapping[str, Any]:
        import torch
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        torch.cuda.current_device = lambda: "cpu"  # where Megatron puts what it makes
        if hasattr(torch.compiler, "set_stance"):
            torch.compiler.set_stance("force_eager")  # what is compiled is the same code
        parallel_state.initialize_model_parallel()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        make = _stacked if overlay == HYBRID else _alone
        router = make(_config(**settings), groups, predicts=predicts).train(trains)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        states, slope = (
            torch.randn(PACK.TOKENS, 1, PACK.HIDDEN, generator=generator),
            torch.randn(PACK.TOKENS, 4, generator=generator),
        )
        found: dict[str, Any] = {}
        for _use in range(PACK.PREDICTIONS):
            found["shares"], found["chosen"] = router(states)
            (found["shares"] * slope).sum().backward()
        if learnt:
            found["gradient of weight"] = router.weight.grad
        return {**found, **(PACK._logged() if logged else {})}

    return on_ranks(1, run)


def _prepare(needed: str) -> None:
    """Import what the rank needs before it is forked.

    Args:
        needed: the module that makes the router, or the router's own.

    Raises:
        TargetAbsent: there is no such module, or no layer of multi-token prediction is used more than once.
    """
    try:
        for each in (needed, PACK.ROUTER):
            importlib.import_module(each)
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {needed}") from error
    if not hasattr(TransformerConfig, "mtp_use_repeated_layer"):
        raise TargetAbsent("no layer of multi-token prediction is used more than once")


def _config(**settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=PACK.LAYERS,
        hidden_size=PACK.HIDDEN,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        add_bias_linear=False,
        use_cpu_initialization=True,
        **{"mtp_num_layers": PACK.PREDICTIONS, "mtp_use_repeated_layer": True, "moe_aux_loss_coeff": 0.0, **settings},
    )


def _stacked(config: Any, groups: Any, *, predicts: bool) -> Any:
    module: Any = importlib.import_module(PACK.STACK)
    theirs = module.HybridStack
    module.HybridStack = lambda **given: theirs(**{**given, "is_mtp_layer": predicts})
    return PACK._stacked(config, groups)


def _alone(config: Any, groups: Any, *, predicts: bool) -> Any:
    router = PACK._router(config, groups, is_mtp_layer=predicts)
    router.set_layer_number(1)
    return router


def _neighbour(name: str, overlay: str, *, rounding: float = 0.0, why_rounding: str = "", **asked: Any) -> Neighbour:
    run = functools.partial(_routed, overlay, **asked)
    return Neighbour(name=name, overlay=overlay, run=run, rounding=rounding, why_rounding=why_rounding)


NEIGHBOURS = (
    _neighbour("balance-of-the-decoder", HYBRID, predicts=False, moe_aux_loss_coeff=0.5),
    _neighbour(
        "balance-of-a-layer-for-each-prediction",
        HYBRID,
        predicts=True,
        logged=False,
        moe_aux_loss_coeff=0.5,
        mtp_use_repeated_layer=False,
    ),
    _neighbour("balance-in-evaluation", HYBRID, predicts=True, trains=False, moe_aux_loss_coeff=0.5),
    _neighbour("z-loss-of-the-decoder", Z_LOSS, predicts=False, moe_z_loss_coeff=0.5),
    _neighbour(
        "z-loss-of-a-layer-for-each-prediction",
        Z_LOSS,
        predicts=True,
        moe_z_loss_coeff=0.5,
        mtp_use_repeated_layer=False,
    ),
    _neighbour("z-loss-of-one-prediction", Z_LOSS, predicts=True, moe_z_loss_coeff=0.5, mtp_num_layers=1),
    _neighbour(
        "z-loss-as-logged",
        Z_LOSS,
        predicts=True,
        moe_z_loss_coeff=0.3,
        mtp_num_layers=3,
        learnt=False,
        rounding=1e-6,
        why_rounding="the loss is divided by the predictions through its coefficient",
    ),
    _neighbour("balance-without-z-loss", Z_LOSS, predicts=True, moe_aux_loss_coeff=0.5),
)
