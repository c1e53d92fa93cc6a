"""Balance each sample of a packed microbatch where sequence parallelism cuts it into shards, as where it does not.

Megatron's `seq_aux_loss` is the mean of the losses of samples. Packing makes one row of all tokens of a microbatch, and a layer gives it
an axis of samples back for its MoE router. It counts samples in the shard that it holds, and a sample there may begin or end on
another rank. So two samples on two ranks are balanced as one, three as well, and of four the first and the third as one.

The layer leaves the row as it is, and tells the router which samples its shard has tokens of. The router sums scores and choices of
tokens by sample, and upstream's loss runs on these sums, as it does on the rows of an axis of samples: it sums each column over ranks,
and those of a sample that lies on several come together. Nothing more is sent than upstream sends with an axis of samples.

Upstream's own code runs, with what it has, without sequence parallelism or with one sample; and, wrong as it is, with context parallelism,
where a layer cannot tell which tokens it holds, with `mlp_chunks_for_training`, with layers in CUDA graphs, and where samples are
no whole part of a row, or ranks no whole part of a sample. A router whose recomputation would have to know of two batches of one size but other samples ends in an error.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from megacpp_overlays.feature_probes import seq_aux_loss_packed as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime.in_this_thread import answer

_KNOWS = "__megacpp_knows_shares__"
"""Attribute of a router's loss that takes shares: a layer tells no other."""


class _Share(NamedTuple):
    """Of which samples a rank's rows are."""

    width: int
    """Tokens of a sample."""
    samples: int
    """Of the whole row, on all ranks."""
    first: int
    """Place of the first row that the rank has in the whole row."""

    def by_sample(self, rows: Any) -> Any:
        """Return rows, [tokens of the rank, experts], as a batch has them, [tokens of a sample, samples * experts], but summed in the first.

        Upstream sums them as well, and takes a rank's tokens of a sample from their number.
        """
        import torch

        ends = [min(max(number * self.width - self.first, 0), len(rows)) for number in range(self.samples + 1)]
        sums = torch.cat([rows[one:other].sum(dim=0) for one, other in itertools.pairwise(ends)])[None]
        return torch.nn.functional.pad(sums, (0, 0, 0, len(rows) // self.samples - 1))


_Size = tuple[int, int]
"""Rows and columns of tokens, as a router sees them."""


class _Told:
    """What a router was told of the batches that it sees."""

    def __init__(self) -> None:
        self._shares: dict[_Size, _Share] = {}
        self._whole: _Size | None = None
        """The last batch that is no share."""

    def tell(self, size: _Size, share: _Share | None, *, recomputed: bool) -> None:
        """Note what the next batch of a size is.

        Raises:
            RuntimeError: it is another than the last of that size, which may be routed again in a backward pass.
        """
        before = self._shares.get(size)
        if recomputed and before != share and (before is not None or self._whole == size):
            raise RuntimeError(
                f"{size[0]} tokens are {_words(share)} here, and were {_words(before)} in a microbatch that the MoE layer may still "
                "recompute: its router could not tell the two apart. What to do: microbatches of one kind, or no "
                "recomputation of moe; MEGACPP_OVERLAY_SEQ_AUX_LOSS_PACKED=off lets it run with upstream's loss"
            )
        if share is None:
            self._shares.pop(size, None)
            self._whole = size
        else:
            self._shares[size] = share
            self._whole = None if self._whole == size else self._whole

    def share(self, size: _Size) -> _Share | None:
        return self._shares.get(size)


def _words(share: _Share | None) -> str:
    return "one sample" if share is None else f"of {share.samples} samples of {share.width}"


_told: weakref.WeakKeyDictionary[Any, _Told] = weakref.WeakKeyDictionary()
"""By router."""


def _make_unflatten(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def _maybe_unflatten_for_moe(
        self: Any, hidden_states: Any, padding_mask: Any, packed_seq_params: Any
    ) -> tuple[Any, Any, Any]:
        router = getattr(self.mlp, "router", None) if self.is_moe_layer and self.training else None
        if router is not None and _listens(router):
            rows, columns = hidden_states.shape[:2]
            share = _share(self, rows, packed_seq_params) if columns == 1 else None
            recomputed = bool(getattr(self.mlp, "moe_layer_recompute", False))
            _told.setdefault(router, _Told()).tell((rows, columns), share, recomputed=recomputed)
            if share is not None:
                return hidden_states, padding_mask, None
        unflattened: tuple[Any, Any, Any] = original(self, hidden_states, padding_mask, packed_seq_params)
        return unflattened

    return _maybe_unflatten_for_moe


def _listens(router: Any) -> bool:
    """Return whether the other seam is there."""
    name = feature.LOSS.rpartition(".")[2]
    return any(getattr(vars(each).get(name), _KNOWS, False) for each in type(router).__mro__)


def _share(layer: Any, rows: int, packed_seq_params: Any) -> _Share | None:
    """Return which samples the rows of a layer are of, or None where upstream's axis of samples is right or must do."""
    width = getattr(packed_seq_params, "tokens_per_sample", None)
    config, group = layer.config, layer.pg_collection.tp
    if width is None or not config.sequence_parallel or config.context_parallel_size > 1:
        return None
    graphs = getattr(config, "cuda_graph_impl", "none")
    if config.mlp_chunks_for_training > 1 or graphs not in {"none", "full_iteration"}:
        return None
    samples, rest = divmod(rows * group.size(), width)
    whole = rest == 0 and width % group.size() == 0
    return _Share(width, samples, rows * group.rank()) if samples > 1 and group.size() > 1 and whole else None


def _make_loss(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def _apply_seq_aux_loss(
        self: Any, probs: Any, scores_for_aux_loss: Any, routing_map: Any, seq_length: int, bsz: int, **kwargs: Any
    ) -> Any:
        told = _told.get(self)
        share = told.share((seq_length, bsz)) if told is not None else None
        if share is None or self.get_aux_loss_coeff("seq_aux_loss") == 0:
            return original(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, **kwargs)
        scores, chosen = (share.by_sample(each) for each in (scores_for_aux_loss, routing_map))
        return original(self, probs, scores, chosen, seq_length // share.samples, share.samples, **kwargs)

    setattr(_apply_seq_aux_loss, _KNOWS, True)
    return _apply_seq_aux_loss


_WIDTH, _SAMPLES, _RANKS, _EXPERTS = 4, (3, 4), 2, 2
_ENOUGH = 1e-5


def observe(module: ModuleType) -> Observation:
    """Let a layer on each of two ranks have a shard of three and of four samples: is its router told of which?"""
    import torch

    class Router:
        """Stands for a router that listens."""

        def _apply_seq_aux_loss(self) -> None: ...

        setattr(_apply_seq_aux_loss, _KNOWS, True)

    seen, broken = [], False
    unflatten = getattr(module, feature.LAYER)._maybe_unflatten_for_moe  # noqa: SLF001 - it is what is replaced
    for samples in (*_SAMPLES, 1):
        rows = samples * _WIDTH // _RANKS
        for rank in range(_RANKS):
            layer = SimpleNamespace(
                is_moe_layer=True,
                training=True,
                config=SimpleNamespace(sequence_parallel=True, context_parallel_size=1, mlp_chunks_for_training=1),
                pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: _RANKS, rank=lambda rank=rank: rank)),
                mlp=SimpleNamespace(router=Router()),
            )
            states = torch.zeros(rows, 1, 1, dtype=torch.float32, device="cpu")
            states, _, unflattened = unflatten(layer, states, None, SimpleNamespace(tokens_per_sample=_WIDTH))
            told = _told.get(layer.mlp.router)
            share = told.share((rows, 1)) if told is not None else None
            right = _Share(_WIDTH, samples, rank * rows) if samples > 1 else None
            broken |= (share, unflattened, *states.shape) != (right, None, rows, 1, 1)
            seen.append(f"of {samples}: {tuple(states.shape[:2])} {'one sample' if share is None else 'told'}")
    return Observation(broken=broken, seen=f"shards on two ranks, {', '.join(seen)}")


def observe_router(module: ModuleType) -> Observation:
    """Tell a router on each of two ranks of which samples its shard is, and compare its loss with the mean over them.

    Nothing is sent: each rank balances what it has of each sample.
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
    """Return what a router makes of the scores of a rank, and what it should be."""
    import torch

    rows, losses = samples * _WIDTH // _RANKS, list[Any]()
    router = module.TopKRouter.__new__(module.TopKRouter)
    torch.nn.Module.__init__(router)
    router.config = SimpleNamespace(num_moe_experts=_EXPERTS, moe_aux_loss_coeff=1.0, moe_router_fusion=False)
    router.routing_type, router.topk, router.tp_cp_group = "seq_aux_loss", 1, None
    router._get_aux_loss_groups = lambda _params: _NO_GROUPS  # noqa: SLF001 - dev asks itself
    router.attach_and_log_load_balancing_loss = lambda _probs, _weight, loss, *_, **_options: losses.append(loss)
    _told.setdefault(router, _Told()).tell((rows, 1), _Share(_WIDTH, samples, rows * rank), recomputed=False)
    owners = torch.arange(rank * rows, (rank + 1) * rows, device="cpu") // _WIDTH
    scores = torch.stack([0.2 + 0.2 * owners, 0.8 - 0.2 * owners], dim=1).to(torch.float32)
    chosen = torch.stack([owners % _EXPERTS == each for each in range(_EXPERTS)], dim=1)
    router._apply_seq_aux_loss(scores, scores, chosen, rows, 1, with_padding_mask=False)  # noqa: SLF001
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
"""What a router of dev says of the ranks that a loss is summed over and logged for."""


@contextlib.contextmanager
def _alone(module: ModuleType) -> Iterator[None]:
    """Let tokens of this thread be counted on this rank alone."""

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
    target: Target, probe: Callable[..., Any], seam: Replacement, watch: Callable[[ModuleType], Observation]
) -> Overlay:
    return Overlay(
        id="seq-aux-loss-packed",
        pack=32,
        title="balance each sample of a packed microbatch under sequence parallelism",
        target=target,
        probe=probe,
        replacements={feature.IN_THE_SHARD: (seam,)},
        unsupported={},
        witness=watch,
        self_test=watch,
        opt_in=False,
        breaks="under sequence parallelism seq_aux_loss balances several packed samples of a microbatch as one",
        brief="seq_aux_loss of packed shards",
        until="a router knows of which samples a shard is",
        retire_when="a router is told which samples its shard of a packed microbatch is of",
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


PARTS = (
    _part(
        feature.ROUTER_TARGET,
        feature.probe_router,
        Replacement(symbol=feature.LOSS, make=_make_loss),
        observe_router,
    ),
    _part(feature.TARGET, feature.probe, Replacement(symbol=feature.UNFLATTEN, make=_make_unflatten), observe),
)
