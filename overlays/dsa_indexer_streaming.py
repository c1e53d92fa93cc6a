"""DSA's index scores and their gradients without a tensor of all queries, heads and keys.

Scores. The whole function is replaced. It returns a new float32 tensor that is not saved, because the loss adds its masks in place.

Loss. Where both bodies are known, the fused indexer loss and its backward are replaced. Upstream builds the main attention's scores,
(batch, attention heads, queries, keys), only for their softmax summed over heads; `attention_target` computes that sum. The remaining
tensors, in blocks of queries, are (batch, queries, keys). Normalisation, divergence and reduction are upstream's own functions where it has
them (see `indexer_loss`), and the sum over tensor-parallel ranks stays where upstream has it.

Top-k. There the function that chooses keys is replaced as well, if its body is known. Upstream's functions make scores and masks;
`top_k.choose` chooses, on devices that have its kernel; on others upstream's function runs. Keys come in the order of positions and
not of scores, followed by -1 where upstream has it; of equal scores at the border the first ones are chosen. No caller of
`fused_qk_topk_naive` up to 0.19.2, main and dev needs the order: losses and attention scatter the indices into masks; attention in
PyTorch and TileLang gathers keys by them and skips negative ones; cuDNN's moves negative ones to the end and sorts the rest; and
compressed attention on dev adds an offset and does the same. Sums over keys run in that order, and round accordingly.

Sparse loss. Since 0.19 it reads the chosen keys alone. There the autograd function of the fused loss is replaced as well, if its body
is known. It works in blocks of queries, whose bounds the kernels take: keys, target and loss are computed for the chosen keys, and
the gradients come from a difference that the forward pass saves for each slot (`kernels.chosen_keys`). No tensor is (batch, queries,
keys). That needs key bounds without a mask or key positions, attention whose heads share their keys, such as absorbed latent
attention, and kernels that support the tensors. Every other call takes the path above.

Backward alone. Where only its body is known, upstream computes the gradient of the scores, bit for bit; the gradients of queries,
weights and keys are ours (see `score_gradient`). Where there is no such backward, as in 0.16, autograd reaches ours through the scores.

Where no kernel was measured, as on a CPU, upstream's functions serve all calls whose largest tensor is small (see
`kernels.measured.serves`). On NVIDIA devices tensor cores multiply bfloat16 queries and keys; everything else runs in blocks in
PyTorch. Sums over heads run in another order than upstream's, so scores differ by float32 rounding, and a top-k may choose
otherwise between keys that are that close.

Not covered: the loss where autograd goes through it, as in 0.16; the backends of `dsa_kernel_backend`, which have their own
indexer; and on dev the loss with an external denominator, and the copy of the scores that compressed sparse attention has for
context parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import dsa_indexer_streaming as feature
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread, variable_for
from megacpp_overlays.runtime.large_results import watch, wave

METHOD = f"DSAIndexer.{feature.SCORES}"
BACKWARD = "bwd_fused_indexer_loss_naive"
LOSS = "compute_dsa_indexer_loss"
TOP_K = "fused_qk_topk_naive"
FUSED_LOSS = "FusedDSAIndexerLoss"
"""The autograd function of the loss."""

_ID = "dsa-indexer-streaming"
_ADVICE = f"{BACKWARD} is unknown to {_ID}; {variable_for(_ID)}=off leaves it to upstream"


def _make_method(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.index_scores import function as index_scores

    def scores(self: Any, q: Any, weights: Any, k: Any) -> Any:
        return index_scores.scores(q, weights, k) if index_scores.serves(q, k) else original(self, q, weights, k)

    return scores


def _make_scores(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.index_scores import function as index_scores
    from megacpp_overlays.runtime.score_gradient import true_tensors

    def scores(q: Any, weights: Any, k: Any) -> Any:
        q, weights, k = true_tensors(q, weights, k)
        return index_scores.scores(q, weights, k) if index_scores.serves(q, k) else original(q, weights, k)

    return scores


def _make_scores_with_optional_relu(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.index_scores import function as index_scores
    from megacpp_overlays.runtime.score_gradient import true_tensors

    def scores(q: Any, weights: Any, k: Any, use_relu: bool = True) -> Any:
        q, weights, k = true_tensors(q, weights, k)
        compute = index_scores.scores if index_scores.serves(q, k) else original
        return compute(q, weights, k, use_relu=use_relu)

    return scores


def _make_backward(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.index_scores import function as index_scores
    from megacpp_overlays.runtime.score_gradient import BackwardTrace

    def backward(q: Any, weights: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        if not index_scores.serves(q, k):
            return original(q, weights, k, *args, **kwargs)
        trace = BackwardTrace(q, weights, k, _ADVICE)
        try:
            returned = original(*trace.proxies(), *args, **kwargs)
        except TypeError as error:  # such as an operator that a proxy does not have
            raise trace.refusal(f"it raises {error}") from error
        grad = trace.gradient(returned)
        return index_scores.gradients(grad, q, weights, k, use_relu=trace.rectified)

    return backward


def _make_softened_loss(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.attention_target import megatron

    return megatron.softened_loss(original)


def _make_softened_backward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.attention_target import megatron

    return megatron.softened_backward(original, _scores_of(module))


def _make_exact_loss(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.attention_target import megatron

    return megatron.exact_loss(original, module)


def _make_exact_backward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.attention_target import megatron

    return megatron.exact_backward(original, module, _scores_of(module))


def _make_exact_loss_external_mass(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.attention_target import megatron

    return megatron.exact_loss_external_mass(original, module)


def _make_exact_backward_external_mass(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.attention_target import megatron

    traced = _make_backward(original, module)
    return megatron.exact_backward_external_mass(original, module, _scores_of(module), traced)


def _make_chosen_forward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.chosen_keys import megatron

    return megatron.forward(original, module)


def _make_chosen_backward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.chosen_keys import megatron

    return megatron.backward(original, module)


def _make_top_k(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.top_k import megatron

    return megatron.chosen(original, _scores_of(module))


def _make_marked_top_k(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    from megacpp_overlays.kernels.top_k import megatron

    return megatron.chosen_and_marked(original, module.dsa_masking, _scores_of(module))


def _scores_of(module: ModuleType) -> Callable[..., Any]:
    """Return a function that calls the index scores of a module, looked up at each call."""

    def scores(*args: Any, **kwargs: Any) -> Any:
        return vars(module)[feature.SCORES](*args, **kwargs)

    return scores


_QUERIES, _BATCH, _HEADS, _KEYS, _DIM = 8, 2, 4, 6, 3
_MAIN_HEADS = 3
"""Heads of the attention: fewer than those of the indexer, so that upstream's attention scores stay below `_BOUND`."""
_BOUND = _QUERIES * _BATCH * _HEADS * _KEYS
_TOLERANCE = 1e-3
"""Relative error in the Euclidean norm: far above float32 rounding, below that of any narrower type."""


def _measure(module: ModuleType) -> tuple[list[str], str | None]:
    """Return the operators whose result is as large as the four-axis tensor, and a description of the first wrong result.

    It runs on CPU tensors and overrides settings of the importing thread. It uses no random numbers, and no autograd,
    whose engine asks the driver for devices when it starts.
    """
    import torch

    from megacpp_overlays.kernels import measured

    with (
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        measured.serving_calls_of_every_size(),
    ):
        shapes = ((_QUERIES, _BATCH, _HEADS, _DIM), (_QUERIES, _BATCH, _HEADS), (_KEYS, _BATCH, _DIM))
        inputs = [wave(*shape) for shape in shapes]
        large: list[str] = []
        for name, found, expected in _cases(module, inputs, large):
            for one, other in zip(found, expected, strict=True):
                if one.shape != other.shape or one.dtype != torch.float32:
                    return large, f"{name} gives {one.dtype} of {tuple(one.shape)}"
                if not (away := ((one - other).norm() / other.norm()).item()) < _TOLERANCE:
                    return large, f"{name} is {away:.1e} away from the definition"
    return large, None


def _cases(module: ModuleType, inputs: list[Any], large: list[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each result, its values from the module, and those of the definition in float64."""
    import inspect

    import torch

    from megacpp_overlays.kernels.index_scores import reference

    backward = getattr(module, BACKWARD, None)
    method = None if hasattr(module, feature.SCORES) else vars(module.DSAIndexer)[feature.SCORES]
    compute = getattr(module, feature.SCORES) if method is None else functools.partial(method, None)
    wide = [each.double() for each in inputs]
    loss, mask, target, factor = _loss()
    takes_mask = backward is not None and "mask" in inspect.signature(backward).parameters
    if takes_mask:
        loss["mask"] = mask
    options = [{"use_relu": True}, {"use_relu": False}] if "use_relu" in inspect.signature(compute).parameters else [{}]
    for option in options:
        expected = reference.scores(*wide, **option)
        with watch(_BOUND, large):
            scores = compute(*inputs, **option)
        yield f"{feature.SCORES}{option or ''}", [scores], [expected]
        if backward is not None:
            above = (torch.softmax(expected + mask, dim=-1) - target) * factor
            with watch(_BOUND, large):
                manual = backward(*inputs, **loss, **option)
            yield f"{BACKWARD}{option or ''}", manual, reference.gradients(above, *wide, **option)
    if (divergence := getattr(module, LOSS, None)) is not None and backward is not None:
        given = {name: value for name, value in loss.items() if name != "grad_loss"}
        with watch(_BOUND, large):
            value = divergence((expected + mask).float(), **given)
        terms = target * (target.clamp_min(1e-30).log() - torch.log_softmax(expected + mask, dim=-1))
        mean = torch.where(mask == 0, terms, 0.0).sum() * loss["loss_coeff"] / (_BATCH * _QUERIES)
        yield LOSS, [value], [mean]


def _loss() -> tuple[dict[str, Any], Any, Any, float]:
    """Return the arguments of a causal indexer loss, and its mask, target and weight by definition.

    Its gradient of the index scores is (softmax(scores + mask) - target) * weight.
    """
    import torch

    query, key = wave(_QUERIES, _BATCH, _MAIN_HEADS, 2), wave(_KEYS, _BATCH, _MAIN_HEADS, 2)
    rows, columns = (torch.arange(size, device="cpu") for size in (_QUERIES, _KEYS))
    mask = torch.zeros((_QUERIES, _KEYS), dtype=torch.float32, device="cpu")
    mask.masked_fill_(columns > rows[:, None], float("-inf"))
    scale, coefficient, above = 0.5, 0.25, 3.0
    loss = {
        "query": query,
        "key": key,
        "topk_indices": torch.zeros((_BATCH, _QUERIES, 1), dtype=torch.int64, device="cpu"),
        "softmax_scale": scale,
        "loss_coeff": coefficient,
        "sparse_loss": False,
        "grad_loss": torch.tensor(above, dtype=torch.float32, device="cpu"),
        "pg_collection": SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    }
    attention = torch.einsum("sbnd,tbnd->bnst", query.double(), key.double()) * scale
    target = torch.softmax(attention + mask, dim=-1).mean(dim=1)
    return loss, mask, target, above * coefficient / (_BATCH * _QUERIES)


def _witness(module: ModuleType) -> Observation:
    large, wrong = _measure(module)
    if wrong is not None:
        return Observation(broken=False, seen=f"its result differs from that of the replacement: {wrong}")
    return Observation(broken=bool(large), seen=_describe(large))


def _self_test(module: ModuleType) -> Observation:
    large, wrong = _measure(module)
    return Observation(broken=bool(large or wrong), seen=wrong or _describe(large))


def _describe(large: list[str]) -> str:
    names = ", ".join(dict.fromkeys(large))
    return (
        f"{len(large)} operators return {_BOUND} or more elements for {_BOUND} in four axes{f': {names}' * bool(names)}"
    )


_BACKWARD = Replacement(symbol=BACKWARD, make=_make_backward)
_SCORES = Replacement(symbol=feature.SCORES, make=_make_scores)
_SCORES_WITH_OPTIONAL_RELU = Replacement(symbol=feature.SCORES, make=_make_scores_with_optional_relu)
_WITH_LOSS = {
    feature.SOFTENED_LOSS: (
        _SCORES,
        Replacement(symbol=LOSS, make=_make_softened_loss),
        Replacement(symbol=BACKWARD, make=_make_softened_backward),
    ),
    feature.EXACT_LOSS: (
        _SCORES_WITH_OPTIONAL_RELU,
        Replacement(symbol=LOSS, make=_make_exact_loss),
        Replacement(symbol=BACKWARD, make=_make_exact_backward),
    ),
    feature.EXACT_LOSS_EXTERNAL_MASS: (
        _SCORES_WITH_OPTIONAL_RELU,
        Replacement(symbol=LOSS, make=_make_exact_loss_external_mass),
        Replacement(symbol=BACKWARD, make=_make_exact_backward_external_mass),
    ),
}
_OVER_CHOSEN_KEYS = {
    feature.EXACT_LOSS: (
        Replacement(symbol=f"{FUSED_LOSS}.forward", make=_make_chosen_forward),
        Replacement(symbol=f"{FUSED_LOSS}.backward", make=_make_chosen_backward),
    ),
}
"""Seams by which a sparse loss reads chosen keys alone, by shape."""
_MARKED_TOP_K = Replacement(symbol=TOP_K, make=_make_marked_top_k)
_TOP_K = {
    feature.SOFTENED_LOSS: Replacement(symbol=TOP_K, make=_make_top_k),
    feature.EXACT_LOSS: _MARKED_TOP_K,
    feature.EXACT_LOSS_EXTERNAL_MASS: _MARKED_TOP_K,
}
OTHER_TOP_K = {shape: f"{shape}-other-top-k" for shape in _WITH_LOSS}
"""For each shape, the one whose top-k stays upstream's. No recorded tree has such a shape."""

OVERLAY = Overlay(
    id=_ID,
    pack=12,
    title="compute DSA's index scores and their gradients without a tensor of all queries, heads and keys",
    target=feature.TARGET,
    probe=feature.probe,
    replacements={
        feature.FOUR_AXIS_METHOD: (Replacement(symbol=METHOD, make=_make_method),),
        feature.FOUR_AXIS: (_SCORES, _BACKWARD),
        feature.FOUR_AXIS_OPTIONAL_RELU: (_SCORES_WITH_OPTIONAL_RELU, _BACKWARD),
        **{OTHER_TOP_K[shape]: seams for shape, seams in _WITH_LOSS.items()},
        **{shape: (*seams, _TOP_K[shape], *_OVER_CHOSEN_KEYS.get(shape, ())) for shape, seams in _WITH_LOSS.items()},
    },
    unsupported={},
    witness=_witness,
    self_test=_self_test,
    opt_in=False,
    symptoms=(
        "step takes tens of GB in the indexer of sparse attention",
        "out of memory in DSA index scores with long sequences",
        "peak memory grows with the square of the sequence length",
    ),
    concerns="dsa",
    breaks="the DSA indexer needs several float32 tensors of (queries, batch, heads, keys), in the backward most of all",
    brief="the memory of DSA's index scores",
    until="Megatron builds no such tensor",
    retire_when="no supported Megatron builds that tensor, neither for the scores nor for their gradients",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=4039, state="open when last seen, a fused loss for TP 1"),
        Thread(repository="NVIDIA/Megatron-LM", number=2869, state="open when last seen"),
        Thread(
            repository="modelscope/mcore-bridge", number=36, state="open when last seen, the einsum asks for 238 GiB"
        ),
        Thread(repository="NVIDIA/Megatron-LM", number=3674, state="closed 2026-06-17, superseded by 5243 to 5247"),
        Thread(repository="NVIDIA/Megatron-LM", number=5246, state="merged 2026-06-25, made the relu optional"),
        Thread(repository="NVIDIA/Megatron-LM", number=5099, state="merged 2026-07-08, adds a cuDNN backend"),
        Thread(repository="NVIDIA/Megatron-LM", number=5049, state="merged 2026-07-24, adds a TileLang backend"),
    ),
    last_validated="2026-11-21, H200, torch 2.11.0+cu130, triton 3.6.0: megatron-core 0.19.2 and dev 945f6a8f05db; x86-64 without "
    "GPU: 0.16.1 to 0.19.2, main, dev and PR 3674",
)
