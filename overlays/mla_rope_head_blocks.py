"""Block sizes of Megatron's fused rotary kernels of multi-latent attention, restricted to those that are right for the number of heads.

`apply_rope_fusion` rotates queries, keys and their gradients with kernels whose programs take BLOCK_H heads of a token each. The
tuner takes the fastest of 1 to 128. Where that is smaller than the heads of a rank and does not divide them, the last program of a
token also writes to the next token. The two in-place kernels have a race between the warps of a program. Neither raises.

While one of upstream's four launches runs, its tuner gets only blocks that divide the heads or hold all of them, and for in-place kernels
only one warp, which runs in order. Its results are cached apart from those that upstream tuned before, and upstream's
tuner is restored when the launch has returned. Launches, kernels and numbers are upstream's own.

A step that `torch.compile` traces has a graph break at these functions, because a graph with upstream's configurations would
be silently wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import mla_rope_head_blocks as feature
from megacpp_overlays.feature_probes.mla_rope_head_blocks import OF_ANY, OF_QUERIES
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread
from megacpp_overlays.runtime.in_this_thread import answer

_BLOCK = "BLOCK_H"


class Launch(NamedTuple):
    """A function that launches a kernel."""

    symbol: str
    kernel: str
    in_place: bool


LAUNCHES = {
    OF_QUERIES: (
        Launch("ApplyMLARotaryEmbQ.forward", "rotary_fwd_q_kernel", in_place=True),
        Launch("ApplyMLARotaryEmbQ.backward", "rotary_bwd_q_kernel", in_place=True),
        Launch("ApplyMLARotaryEmbKV.forward", "rotary_fwd_kv_kernel", in_place=False),
        Launch("ApplyMLARotaryEmbKV.backward", "rotary_bwd_kv_kernel", in_place=False),
    ),
    OF_ANY: (
        Launch("_FusedMLARoPEInplace.forward", "_mla_rope_fwd_inplace_kernel", in_place=True),
        Launch("_FusedMLARoPEInplace.backward", "_mla_rope_bwd_inplace_kernel", in_place=True),
        Launch("_FusedMLARoPEKVSplit.forward", "_mla_rope_fwd_kv_split_kernel", in_place=False),
        Launch("_FusedMLARoPEKVSplit.backward", "_mla_rope_bwd_kv_split_kernel", in_place=False),
    ),
}
"""Launches of each shape."""


def allowed(configs: Sequence[Any], heads: int, *, in_place: bool) -> list[Any]:
    """Return the configurations of a tuner that are right for a number of heads.

    Args:
        configs: of upstream's tuner.
        heads: of one rank.
        in_place: whether the kernel writes where it reads; then each configuration gets one warp.
    """
    dividing = [each for each in configs if _is_right(each.kwargs[_BLOCK], heads)]
    if not in_place:
        return dividing
    return [type(each)(dict(each.kwargs), num_warps=1, num_stages=each.num_stages) for each in dividing]


def _is_right(block: int, heads: int) -> bool:
    """Return whether no program reaches the next token: a block that holds all heads has no second program."""
    return block >= heads or heads % block == 0


class _TunerProxy:
    """Restriction of a tuner to right configurations while a launch runs on any thread."""

    def __init__(self, tuner: Any, launch: Launch) -> None:
        self._tuner, self._launch = tuner, launch
        self._lock = threading.Lock()
        self._running = 0
        self._tuned: dict[Any, Any] = {}
        self._upstreams: tuple[Any, Any] = (None, None)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Narrow the tuner until the end of the block."""
        tuner = self._tuner
        with self._lock:
            if not self._running:
                self._upstreams = tuner.early_config_prune, tuner.cache
                tuner.early_config_prune, tuner.cache = self._prune, self._tuned
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    tuner.early_config_prune, tuner.cache = self._upstreams

    def _prune(self, configs: Sequence[Any], named: Any, **more: Any) -> list[Any]:
        right = allowed(configs, {**named, **more}["head_num"], in_place=self._launch.in_place)
        before = self._upstreams[0]
        return right if before is None else list(before(right, named, **more))


def _make(launch: Launch) -> Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]:
    def make(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        tuner = getattr(module, launch.kernel)
        if not _is_tuner(tuner):
            return lambda *args, **kwargs: original(*args, **kwargs)
        narrowed = _TunerProxy(tuner, launch)

        def launching(*args: Any, **kwargs: Any) -> Any:
            with narrowed.during():
                return original(*args, **kwargs)

        return launching

    return make


def _is_tuner(kernel: Any) -> bool:
    """Return whether a kernel has a tuner; where Triton is missing it is a plain function that cannot be launched."""
    return hasattr(kernel, "early_config_prune") and hasattr(kernel, "configs")


_HEADS = (3, 20)
_TOKENS, _WIDTH = 2, 4


def _shape_of(module: ModuleType) -> str:
    return next(shape for shape, launches in LAUNCHES.items() if hasattr(module, launches[0].kernel))


def _tried(module: ModuleType, launch: Launch, heads: int) -> list[tuple[int, int]]:
    """Return the blocks, and the warps of each, that a launch of the live module would try for a number of heads."""
    import torch

    tuner = getattr(module, launch.kernel)
    found: list[tuple[int, int]] = []

    def run(*args: Any, **kwargs: Any) -> None:
        named = dict(zip(tuner.arg_names, args, strict=False))
        prune = tuner.early_config_prune
        configs = tuner.configs if prune is None else prune(tuner.configs, named, **kwargs)
        found.extend((each.kwargs[_BLOCK], each.num_warps) for each in configs)

    before = vars(tuner).get("run")
    tuner.run = answer(run, tuner.run)
    try:
        with torch.inference_mode(False), torch.no_grad():
            _launch(module, launch, heads, torch)
    finally:
        if before is None:
            del tuner.run
        else:
            tuner.run = before
    return found


def _launch(module: ModuleType, launch: Launch, heads: int, torch: Any) -> None:
    """Call a launch with small tensors on the CPU, as autograd does."""
    name, _, step = launch.symbol.partition(".")
    function = getattr(module, name)

    def tensor(*shape: int) -> Any:
        return torch.zeros(*shape, dtype=torch.float32, device="cpu")

    angles = tensor(_TOKENS, 1, 1, _WIDTH)
    ctx = SimpleNamespace(
        saved_tensors=(angles, angles),
        has_position_ids=False,
        save_for_backward=lambda *_: None,
        qk_head_dim=_WIDTH,
        nope_dim=_WIDTH,
        emb_dim=_WIDTH,
        k_dim=_WIDTH,
        v_dim=_WIDTH,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        rotary_interleaved=False,
        inverse=False,
        remove_interleaving=False,
        cp_rank=0,
        cp_size=1,
    )
    both = tensor(_TOKENS, 1, heads, 2 * _WIDTH)
    place = (None, 0, 1) if "cp_rank" in getattr(module, launch.kernel).arg_names else (None,)
    if step == "backward":
        given = (both,) if launch.in_place else (both, tensor(_TOKENS, 1, heads, _WIDTH))
        function.backward(ctx, *given)
    elif launch.in_place:
        function.forward(ctx, both, angles, angles, _WIDTH, _WIDTH, *place)
    else:
        keys = tensor(_TOKENS, 1, 1, _WIDTH)
        function.forward(ctx, both, keys, angles, angles, _WIDTH, _WIDTH, _WIDTH, *place)


def _observe(module: ModuleType, *, without_triton: bool) -> Observation:
    launches = LAUNCHES[_shape_of(module)]
    if not all(_is_tuner(getattr(module, each.kernel)) for each in launches):
        return Observation(broken=without_triton, seen="nothing is tuned, since Triton is not here")
    wrong: list[str] = []
    for launch in launches:
        for heads in _HEADS:
            tried = _tried(module, launch, heads)
            odd = [block for block, warps in tried if not _is_right(block, heads) or (launch.in_place and warps != 1)]
            if odd or not tried:
                wrong.append(f"{launch.kernel} tries {odd or 'nothing'} for {heads} heads")
    return Observation(
        broken=bool(wrong), seen=wrong[0] if wrong else "no block that is tried goes on into the next token"
    )


def _witness(module: ModuleType) -> Observation:
    return _observe(module, without_triton=True)


def _self_test(module: ModuleType) -> Observation:
    return _observe(module, without_triton=False)


OVERLAY = Overlay(
    id="mla-rope-head-blocks",
    pack=35,
    title="tune Megatron's fused rotary kernels of MLA over blocks that end with the heads, in place over one warp",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        shape: tuple(Replacement(symbol=each.symbol, make=_make(each)) for each in launches)
        for shape, launches in LAUNCHES.items()
    },
    unsupported={},
    witness=_witness,
    self_test=_self_test,
    opt_in=False,
    symptoms=(
        "some heads of attention are wrong with apply_rope_fusion",
        "one head of attention is wrong and the others are right",
        "results change from run to run with fused rotary embeddings of MLA",
        "loss with apply_rope_fusion is worse than without, in multi-latent attention",
    ),
    concerns="mla and rope_fusion",
    breaks="with apply_rope_fusion queries, keys and gradients of MLA are rotated twice, or half, where the tuner takes such a block",
    retire_when="masks of the fused MLA kernels know their block, and warps in place wait for each other",
    brief="fused MLA rotary embeddings",
    until="masks of these kernels know their block",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=7103, state="open when last seen, the masks"),
        Thread(repository="NVIDIA/Megatron-LM", number=6890, state="open when last seen, repairs the masks"),
        Thread(repository="NVIDIA/Megatron-LM", number=7104, state="open when last seen, repairs the masks"),
        Thread(repository="NVIDIA/Megatron-LM", number=4640, state="open when last seen, warps in place"),
        Thread(repository="NVIDIA/Megatron-LM", number=5963, state="open when last seen, a barrier for warps in place"),
        Thread(repository="NVIDIA/Megatron-LM", number=5981, state="closed when last seen, one warp in place"),
    ),
    last_validated="2026-11-23, H200, torch 2.11.0+cu130, triton 3.6.0: megatron-core 0.19.2; also on x86-64, its kernels interpreted",
)
