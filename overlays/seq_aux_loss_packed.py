"""Per-sample `seq_aux_loss` of packed microbatches under sequence parallelism.

Megatron's `seq_aux_loss` is the mean of the losses of samples. Packing makes one row of all tokens of a microbatch, and a layer restores
the axis of samples for its MoE router. It counts samples in the shard that it holds, but a sample there may begin or end on
another rank. So two samples on two ranks are balanced as one, three as well, and of four the first and the third as one.

The layer leaves the row unchanged. While it calls its MoE layer, a thread-local record holds the samples whose tokens are in the
shard. The router sums scores and choices of tokens by sample, and upstream's loss runs on these sums, as it does on the rows of an axis of
samples. It sums each column over ranks, which combines the parts of a sample on several ranks. The communication is that of
upstream with an axis of samples.

The record is restored when the call ends, also by an exception, so a router that is called in another way has none. A
recomputation of the MoE layer runs in the backward pass, so the function that it calls again holds the record of its own microbatch.

Upstream's code runs unchanged, and is right, without sequence parallelism or with one sample. It also runs unchanged, and is wrong, with
context parallelism, where a layer cannot know which tokens it holds; with `mlp_chunks_for_training`; with layers in CUDA graphs; where an
expert's capacity drops tokens by their position; where a row is not a whole number of samples, or a sample is not divisible by the ranks;
and where a subclass has its own loss or forward pass.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from megacpp_overlays.feature_probes import seq_aux_loss_packed as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime.in_this_thread import Instead, answer
from megacpp_overlays.runtime.overrides import reaches

CALLER = f"{feature.LAYER}._forward_mlp"
CALLER_OF_DEV = f"{feature.LAYER}._forward_mlp_output_with_bias"
"""Calls the method and then the MoE layer."""

_KNOWS = "__megacpp_knows_shares__"
"""Attribute of the seams that take shares: of a router's loss, and of an MoE layer's forward pass."""


class _Share(NamedTuple):
    """Samples that the rows of a rank belong to."""

    width: int
    """Tokens of a sample."""
    samples: int
    """Number of samples in the whole row, on all ranks."""
    first: int
    """Position in the whole row of the rank's first row."""

    def by_sample(self, rows: Any) -> Any:
        """Return rows, [tokens of the rank, experts], in the layout of a batch, [tokens of a sample, samples * experts].

        The first row has the sums by sample and the other rows are zeros. Upstream sums them as well, and takes the number of a rank's
        tokens of a sample from the number of rows.
        """
        import torch

        ends = [min(max(number * self.width - self.first, 0), len(rows)) for number in range(self.samples + 1)]
        sums = torch.cat([rows[one:other].sum(dim=0) for one, other in itertools.pairwise(ends)])[None]
        return torch.nn.functional.pad(sums, (0, 0, 0, len(rows) // self.samples - 1))


class _RoutedTokens(NamedTuple):
    """Router of an MoE layer with the size and the samples of its input."""

    router: Any
    size: tuple[int, int]
    """Rows and columns of tokens in the router's input."""
    share: _Share


class _MlpCall:
    """One call of a layer's MLP, with the input that is routed in it."""

    def __init__(self, routed: _RoutedTokens | None = None) -> None:
        self.routed = routed


_here = threading.local()
"""`call`: the innermost call of a layer's MLP in this thread."""


def _during(call: _MlpCall, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as a part of a layer's call of its MLP."""
    before = getattr(_here, "call", None)
    _here.call = call
    try:
        return function(*args, **kwargs)
    finally:
        _here.call = before


def _share_now(router: Any, size: tuple[int, int]) -> _Share | None:
    """Return the samples of the rows that a router gets now, or None where no layer recorded them."""
    call = getattr(_here, "call", None)
    routed = None if call is None else call.routed
    return routed.share if routed is not None and routed.router is router and routed.size == size else None


def _make_caller(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def call_mlp(*args: Any, **kwargs: Any) -> Any:
        return _during(_MlpCall(), original, *args, **kwargs)

    return call_mlp


def _make_unflatten(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def _maybe_unflatten_for_moe(
        self: Any, hidden_states: Any, padding_mask: Any, packed_seq_params: Any, **more: Any
    ) -> tuple[Any, Any, Any]:
        call = getattr(_here, "call", None)
        if call is not None and self.is_moe_layer and self.training and hidden_states.shape[1] == 1:
            rows = hidden_states.shape[0]
            share = _share(self, rows, packed_seq_params)
            if share is not None and _listens(self.mlp):
                call.routed = _RoutedTokens(self.mlp.router, (rows, 1), share)
                return hidden_states, padding_mask, None
        unflattened: tuple[Any, Any, Any] = original(self, hidden_states, padding_mask, packed_seq_params, **more)
        return unflattened

    return _maybe_unflatten_for_moe


def _listens(experts: Any) -> bool:
    """Return whether the loss of an MoE layer's router takes shares, and a recomputation of the layer keeps them."""
    router = getattr(experts, "router", None)
    recomputed = getattr(experts, "moe_layer_recompute", False)
    return _takes_shares(router, feature.LOSS) and (not recomputed or _takes_shares(experts, feature.EXPERTS))


def _takes_shares(holder: Any, symbol: str) -> bool:
    name = symbol.rpartition(".")[2]
    return reaches(type(holder), name, lambda _, raw: getattr(raw, _KNOWS, False))


_ORDERED = frozenset({"position"})
"""Policies that drop tokens by their order, which an axis of samples changes."""


def _share(layer: Any, rows: int, packed_seq_params: Any) -> _Share | None:
    """Return the samples of the rows of a layer, or None where upstream's axis of samples is right or the case is not supported."""
    width = getattr(packed_seq_params, "tokens_per_sample", None)
    config, group = layer.config, layer.pg_collection.tp
    if width is None or not config.sequence_parallel or config.context_parallel_size > 1:
        return None
    graphs = getattr(config, "cuda_graph_impl", "none")
    if config.mlp_chunks_for_training > 1 or graphs not in {"none", "full_iteration"}:
        return None
    drops = getattr(config, "moe_expert_capacity_factor", None) is not None
    if drops and config.moe_token_drop_policy in _ORDERED:
        return None
    samples, rest = divmod(rows * group.size(), width)
    whole = rest == 0 and width % group.size() == 0
    return _Share(width, samples, rows * group.rank()) if samples > 1 and group.size() > 1 and whole else None


def _make_loss(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def _apply_seq_aux_loss(
        self: Any,
        probs: Any,
        scores_for_aux_loss: Any,
        routing_map: Any,
        seq_length: int,
        bsz: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        share = _share_now(self, (seq_length, bsz))
        if share is None or self.get_aux_loss_coeff("seq_aux_loss") == 0:
            return original(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, *args, **kwargs)
        scores, chosen = (share.by_sample(each) for each in (scores_for_aux_loss, routing_map))
        return original(self, probs, scores, chosen, seq_length // share.samples, share.samples, *args, **kwargs)

    setattr(_apply_seq_aux_loss, _KNOWS, True)
    return _apply_seq_aux_loss


def _make_experts(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call: _MlpCall | None = getattr(_here, "call", None)
        if call is None or call.routed is None or call.routed.router is not self.router or not self.moe_layer_recompute:
            return original(self, *args, **kwargs)
        return original(_RoutingIn(call, self), *args, **kwargs)

    setattr(forward, _KNOWS, True)
    return forward


class _RoutingIn:
    """Proxy for an MoE layer that routes as a part of a call, also later: upstream's closure holds it until the backward pass."""

    def __init__(self, call: _MlpCall, experts: Any) -> None:
        vars(self).update(_call=call, _experts=experts)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_experts"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_experts"], name, value)

    def route(self, *args: Any, **kwargs: Any) -> Any:
        return _during(vars(self)["_call"], vars(self)["_experts"].route, *args, **kwargs)


_WIDTH, _SAMPLES, _RANKS, _EXPERTS = 4, (3, 4), 2, 2
_ENOUGH = 1e-5


def observe(module: ModuleType) -> Observation:
    """Observe whether a layer on each of two ranks passes a shard of three and of four samples unchanged, with a record of the samples."""
    import torch

    found, right = [], []
    for samples in (*_SAMPLES, 1):
        rows = samples * _WIDTH // _RANKS
        for rank in range(_RANKS):
            layer = _layer(module, rank)
            states = torch.zeros(rows, 1, 1, dtype=torch.float32, device="cpu")
            _call_of(module)(layer, states, packed_seq_params=SimpleNamespace(tokens_per_sample=_WIDTH))
            shape, share = layer.mlp.seen
            found.append((*shape, share, _share_now(layer.mlp.router, (rows, 1))))
            right.append((rows, 1, 1, _Share(_WIDTH, samples, rank * rows) if samples > 1 else None, None))
    seen = ", ".join(f"{rows} by {columns} {'noted' if share else 'as one'}" for rows, columns, _, share, _ in found)
    return Observation(broken=found != right, seen=f"shards of 3, 4 and 1 samples on two ranks, {seen}")


def _call_of(module: ModuleType) -> Callable[..., Any]:
    """Return the method that calls an MLP."""
    layer = getattr(module, feature.LAYER)
    of_dev = CALLER_OF_DEV.rpartition(".")[2]
    call: Callable[..., Any] = getattr(layer, of_dev, None) or layer._forward_mlp  # noqa: SLF001 - the replaced method
    return call


def _layer(module: ModuleType, rank: int) -> Any:
    """Return a layer of one of two ranks, with an MoE layer that records its input and samples."""
    import torch

    class ListeningRouter:
        """Stub of a router whose loss takes shares."""

        def _apply_seq_aux_loss(self) -> None: ...

        setattr(_apply_seq_aux_loss, _KNOWS, True)

    class Experts(torch.nn.Module):  # type: ignore[misc]
        def forward(self, states: Any, **_: Any) -> tuple[Any, None]:
            self.seen = tuple(states.shape), _share_now(self.router, tuple(states.shape[:2]))
            return states, None

    experts = Experts()
    experts.router = ListeningRouter()
    return _UpstreamLayer(
        getattr(module, feature.LAYER),
        is_moe_layer=True,
        training=True,
        config=_NothingElse(
            sequence_parallel=True,
            context_parallel_size=1,
            cuda_graph_impl="none",
            mlp_chunks_for_training=1,
            mlp_chunks_for_prefill=1,
        ),
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: _RANKS, rank=lambda: rank)),
        mlp=experts,
        _forward_pre_mlp_layernorm=lambda states: states,
        _forward_post_mlp=lambda output, _residual: output,
        _apply_mlp_bda_step=lambda output, _residual, _state: output,
    )


class _NothingElse(SimpleNamespace):
    """Namespace whose missing attributes are None."""

    def __getattr__(self, name: str) -> Any:
        return None


class _UpstreamLayer(_NothingElse):
    """Namespace with the methods of a class of upstream, whose constructor would need process groups."""

    def __init__(self, kind: type, **own: Any) -> None:
        super().__init__(_kind=kind, **own)

    def __getattr__(self, name: str) -> Any:
        method = getattr(vars(self)["_kind"], name, None)
        return None if method is None else method.__get__(self)


def observe_experts(module: ModuleType) -> Observation:
    """Observe the samples of a router when an MoE layer routes a shard and recomputes it after the call, as in a backward pass."""
    import torch

    found: list[_Share | None] = []
    deferred: list[Callable[[], Any]] = []

    class AskingRouter(torch.nn.Module):  # type: ignore[misc]
        def forward(self, states: Any, *_: Any) -> tuple[Any, Any]:
            found.append(_share_now(self, tuple(states.shape[:2])))
            return states, states

    def checkpoint(function: Callable[..., Any], _distributes: bool, *given: Any) -> tuple[Any, Any]:
        deferred.append(lambda: function(*given))
        return given[0], None

    experts = module.MoELayer.__new__(module.MoELayer)
    torch.nn.Module.__init__(experts)
    for name, value in {
        "router": AskingRouter(),
        "attn_tp_group": SimpleNamespace(size=lambda: 1),
        "config": _NothingElse(sequence_parallel=True),
        "fwd_execution_map": ["route"],
        "moe_layer_recompute": True,
        "shared_experts_compute": lambda _states: None,
        "preprocess": lambda states, probs, _map: (states, probs),
    }.items():
        setattr(experts, name, value)
    share = _Share(_WIDTH, _SAMPLES[0], 0)
    states = torch.zeros(_WIDTH, 1, 1, dtype=torch.float32, device="cpu")
    parallel = module.tensor_parallel
    names, replaced = vars(module), Instead(parallel, checkpoint=answer(checkpoint, parallel.checkpoint))
    call = _MlpCall(_RoutedTokens(experts.router, (_WIDTH, 1), share))
    try:
        names["tensor_parallel"] = replaced
        _during(call, module.MoELayer.forward, experts, states, (states, states))
    finally:
        names["tensor_parallel"] = parallel
    for again in deferred:
        again()
    experts.route(states)
    return Observation(
        broken=found != [share, None],
        seen=f"a router that an MoE layer recomputes {'has' if found[0] else 'lacks'} the note of its microbatch",
    )


def observe_router(module: ModuleType) -> Observation:
    """Compare a router's loss of a shard on each of two ranks with the mean over its samples.

    There is no communication: each rank balances its own part of each sample.
    """
    import torch

    seen, broken = [], False
    with torch.inference_mode(False), torch.enable_grad(), _alone(module):
        for samples in _SAMPLES:
            for rank in range(_RANKS):
                found, right = _losses(module, samples, rank)
                broken |= not abs(found - right) < _ENOUGH
                seen.append(f"{found:.4f} where {right:.4f} is right")
    return Observation(broken=broken, seen=f"losses of 3 and of 4 packed samples on two ranks: {', '.join(seen)}")


def _losses(module: ModuleType, samples: int, rank: int) -> tuple[float, float]:
    """Return a router's loss of the scores of a rank, and the right loss."""
    import torch

    rows, losses = samples * _WIDTH // _RANKS, list[Any]()
    router = module.TopKRouter.__new__(module.TopKRouter)
    torch.nn.Module.__init__(router)
    router.config = SimpleNamespace(num_moe_experts=_EXPERTS, moe_aux_loss_coeff=1.0, moe_router_fusion=False)
    router.routing_type, router.topk, router.tp_cp_group = "seq_aux_loss", 1, None
    router._get_aux_loss_groups = lambda _params: _NO_GROUPS  # noqa: SLF001 - dev asks itself
    router.attach_and_log_load_balancing_loss = lambda _probs, _weight, loss, *_, **_options: losses.append(loss)
    owners = torch.arange(rank * rows, (rank + 1) * rows, device="cpu") // _WIDTH
    scores = torch.stack([0.2 + 0.2 * owners, 0.8 - 0.2 * owners], dim=1).to(torch.float32)
    chosen = torch.stack([owners % _EXPERTS == each for each in range(_EXPERTS)], dim=1)
    call = _MlpCall(_RoutedTokens(router, (rows, 1), _Share(_WIDTH, samples, rows * rank)))
    _during(call, router._apply_seq_aux_loss, scores, scores, chosen, rows, 1, with_padding_mask=False)  # noqa: SLF001
    own = [(scores[owners == each].sum(0), chosen[owners == each].sum(0)) for each in range(samples)]
    right = sum(float((score * count).sum()) for score, count in own) * _EXPERTS / (rows / samples) ** 2 / samples
    return float(losses[0].detach()), right


_NO_GROUPS = SimpleNamespace(
    loss_reduce_groups=(None,),
    metric_reduce_group=None,
    metric_avg_group=None,
    metric_needs_dp_avg=False,
    metric_pre_reduce_groups=(),
)
"""Groups over which a router of dev sums and logs a loss: none."""


@contextlib.contextmanager
def _alone(module: ModuleType) -> Iterator[None]:
    """Count tokens of this thread on this rank alone, without communication."""

    def counted(*, routing_map: Any, topk: int, with_padding_mask: bool, **_: Any) -> tuple[Any, Any, Any]:
        counts = routing_map.sum(dim=0)
        tokens = counts.sum() / topk if with_padding_mask else routing_map.shape[0]
        return counts, tokens, tokens

    names, name = vars(module), "get_tokens_per_expert_and_token_count"
    theirs = names[name]
    try:
        names[name] = answer(counted, theirs)
        yield
    finally:
        names[name] = theirs


def _part(
    target: Target,
    probe: Callable[..., Any],
    seams: dict[str, tuple[Replacement, ...]],
    watch: Callable[[ModuleType], Observation],
    *needed: Target,
) -> Overlay:
    return Overlay(
        id="seq-aux-loss-packed",
        pack=32,
        title="balance each sample of a packed microbatch under sequence parallelism",
        target=target,
        probe=probe,
        replacements=seams,
        unsupported={},
        witness=watch,
        self_test=watch,
        opt_in=False,
        needs_parts=tuple(each.module for each in needed),
        symptoms=(
            "seq_aux_loss differs with sequence parallelism",
            "experts are unbalanced with packed samples and seq_aux_loss",
        ),
        concerns="experts and seq_aux_loss and sequence_parallel and tensor_parallel and packed",
        breaks="under sequence parallelism seq_aux_loss balances several packed samples of a microbatch as one",
        brief="seq_aux_loss of packed shards",
        until="a router knows of which samples a shard is",
        retire_when="a router gets the samples that its shard of a packed microbatch belongs to",
        threads=(
            Thread(repository="NVIDIA/Megatron-LM", number=5996, state="closed, opened 2026-07-23, seen 2026-11-23"),
            Thread(repository="NVIDIA/Megatron-LM", number=5696, state="merged 2026-07-10, counts in the shard"),
            Thread(
                repository="NVIDIA/Megatron-LM",
                number=6115,
                state="open, opened 2026-07-29, seen 2026-11-23: other rows",
            ),
        ),
        last_validated="2026-11-23, x86-64 without GPU, torch 2.11.0: megatron-core 0.19.2, main d98e8a64dd and dev d48bd6be0a on two and "
        "four gloo ranks; 0.19.0 and 0.19.1 read",
    )


_UNFLATTEN = Replacement(symbol=feature.UNFLATTEN, make=_make_unflatten)
PARTS = (
    _part(
        feature.ROUTER_TARGET,
        feature.probe_router,
        {feature.IN_THE_SHARD: (Replacement(symbol=feature.LOSS, make=_make_loss),)},
        observe_router,
    ),
    _part(
        feature.EXPERTS_TARGET,
        feature.probe_experts,
        {feature.IN_THE_SHARD: (Replacement(symbol=feature.EXPERTS, make=_make_experts),)},
        observe_experts,
        feature.ROUTER_TARGET,
    ),
    _part(
        feature.TARGET,
        feature.probe,
        {
            feature.IN_THE_SHARD: (_UNFLATTEN, Replacement(symbol=CALLER, make=_make_caller)),
            feature.IN_THE_SHARD_OF_DEV: (_UNFLATTEN, Replacement(symbol=CALLER_OF_DEV, make=_make_caller)),
        },
        observe,
        feature.ROUTER_TARGET,
        feature.EXPERTS_TARGET,
    ),
)
