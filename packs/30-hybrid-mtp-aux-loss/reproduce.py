"""Megatron's MoE losses of a multi-token prediction layer that is used twice: do they count once?

A real router routes the same tokens twice, as the repeated layer of two predictions does, and nothing else is learnt from than its
auxiliary loss, with and without `calculate_per_token_loss`. The gradient of its weights is to be the one of a single use. In `hybrid-cpu` a
real `MultiTokenPredictionLayer` makes a real `HybridStack`, and that a real `MoELayer`, and the loss is the one that balances load; in
`z-loss-cpu` the router is told that it predicts, and the loss is the z-loss.
"""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

STACK = "megatron.core.models.hybrid.hybrid_block"
ROUTER = "megatron.core.transformer.moe.router"
UTILS = "megatron.core.transformer.moe.moe_utils"
EXPERTS = "megatron.core.transformer.moe.moe_layer"
PREDICTION = "megatron.core.transformer.multi_token_prediction"
INFERENCE = "is_inference_column_parallel_linear"
PREDICTIONS, LAYERS, TOKENS, HIDDEN = 2, 3, 6, 8
ROUNDING = 1e-5


def _hybrid() -> Behaviour:
    return _in_a_process(_stacked, STACK, aux_loss=True)


def _z_loss() -> Behaviour:
    return _in_a_process(_told, ROUTER, aux_loss=False)


def _in_a_process(make: Callable[..., Any], needed: str, *, aux_loss: bool) -> Behaviour:
    """Run in a fork, which may say where Megatron's tensors go."""
    import torch  # noqa: F401 - once, before the fork

    try:
        for each in (needed, ROUTER):
            importlib.import_module(each)
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {needed}") from error
    if not hasattr(TransformerConfig, "mtp_use_repeated_layer"):
        raise TargetAbsent("no layer of multi-token prediction is used more than once")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_measured, args=(make, aux_loss, Path(folder)))
        process.start()
        process.join()
        mean, of_tokens, slot = Path(folder, "times").read_text().split()
    words = f"used {PREDICTIONS} times, the gradient is {float(mean):.4f} times that of one use, and {float(of_tokens):.4f} times with the loss of each token"
    logged = f", and is logged for layer {slot} of {LAYERS} and {PREDICTIONS} predictions"
    is_wrong = any(abs(float(each) - 1) > ROUNDING for each in (mean, of_tokens))
    return Behaviour(broken=is_wrong or int(slot) <= LAYERS, seen=words + logged)


def _measured(make: Callable[..., Any], aux_loss: bool, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # where Megatron puts what it makes
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    times: list[float] = []
    for of_tokens in (True, False):
        repeated, once = (_gradient(make, groups, aux_loss, predictions, of_tokens) for predictions in (PREDICTIONS, 1))
        times.insert(0, float(repeated.norm() / once.norm()))
    (values,) = _logged().values()  # of the use that came last
    slot = int(values.nonzero()[0]) + 1
    (folder / "times").write_text(f"{times[0]} {times[1]} {slot}")
    torch.distributed.destroy_process_group()


def _gradient(make: Callable[..., Any], groups: Any, aux_loss: bool, predictions: int, of_tokens: bool) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    _log().clear()  # nothing of the other use
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.5 if aux_loss else 0.0,
        moe_z_loss_coeff=None if aux_loss else 0.5,
        mtp_num_layers=predictions,
        mtp_use_repeated_layer=True,
        calculate_per_token_loss=of_tokens,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    router = make(config, groups)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
    states = torch.randn(TOKENS, 1, HIDDEN, generator=generator)
    for _ in range(predictions):
        shares, _ = router(states)
        (shares * 0.0).sum().backward()
    return router.weight.grad


def _log() -> Any:
    """Return the losses that are logged, by name: a table of tables up to 0.17."""
    utils: Any = importlib.import_module(UTILS)
    if hasattr(utils, "get_moe_metrics_tracker"):
        return utils.get_moe_metrics_tracker()._metrics  # noqa: SLF001
    return utils.get_moe_layer_wise_logging_tracker()


def _logged() -> dict[str, Any]:
    """Return the losses that are logged, a number for each layer, by name."""
    return {name: each["values"] if isinstance(each, dict) else each.values for name, each in _log().items()}


def _stacked(config: Any, groups: Any) -> Any:
    """Return the router of a layer that the stack of a prediction layer made."""
    import torch
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Nothing(torch.nn.Module):  # type: ignore[misc]
        """Norms, projections and experts, which are not asked."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    class Layer(torch.nn.Module):  # type: ignore[misc]
        """What of a transformer layer is about its experts."""

        def __init__(
            self, config: Any, layer_number: int, pg_collection: Any, *, is_mtp_layer: bool = False, **_: Any
        ) -> None:
            super().__init__()
            self.mlp = importlib.import_module(EXPERTS).MoELayer(
                config,
                SimpleNamespace(router=_router_of_layer, experts=Nothing, shared_experts=None),
                pg_collection=pg_collection,
                is_mtp_layer=is_mtp_layer,
            )
            self.mlp.set_layer_number(layer_number)

    blank = ModuleSpec(module=Nothing)
    prediction: Any = importlib.import_module(PREDICTION)
    if hasattr(prediction, INFERENCE):  # it asks for classes of Transformer Engine, and raises without it
        setattr(prediction, INFERENCE, lambda _: False)
    layer = prediction.MultiTokenPredictionLayer(
        config,
        SimpleNamespace(enorm=Nothing, hnorm=Nothing, layer_norm=Nothing, eh_proj=blank, mtp_model_layer=None),
        pg_collection=groups,
        mtp_layer_pattern=Symbols.MOE,
        hybrid_submodules=SimpleNamespace(moe_layer=ModuleSpec(module=Layer)),
    )
    return layer.mtp_model_layer.layers[0].mlp.router


def _router_of_layer(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module(ROUTER).TopKRouter(*args, **kwargs)


def _told(config: Any, groups: Any) -> Any:
    """Return a router that knows that it is for predictions."""
    router = _router(config, groups, is_mtp_layer=True)
    router.set_layer_number(1)
    return router


def _router(config: Any, groups: Any, *, is_mtp_layer: bool) -> Any:
    return importlib.import_module(ROUTER).TopKRouter(config, groups, is_mtp_layer=is_mtp_layer)


def _case(name: str, overlay: str, run: Callable[[], Behaviour], target: str) -> Case:
    return Case(name=name, overlay=overlay, device="cpu", versions=("torch",), run=run, targets=(target,))


CASES = (
    _case("hybrid-cpu", "hybrid-mtp-aux-loss", _hybrid, STACK),
    _case("z-loss-cpu", "mtp-z-loss", _z_loss, ROUTER),
)
