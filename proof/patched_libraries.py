"""Libraries that replace functions of upstreams, and how each of them applies its patches."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator

UPSTREAMS = (
    "megatron.core",
    "transformer_engine",
    "liger_kernel",
    "mamba_ssm",
    "torch",
    "transformers",
    "peft",
    "triton",
)
"""Packages whose names are compared."""
SUBCLASSED = ("megatron.core", "transformer_engine", "liger_kernel.ops")
"""Packages whose classes others derive their own from."""
ALONE, BEFORE, AFTER = "alone", "before", "after"


def verl() -> Iterator[str]:
    """Apply every patch of verl that replaces a name of a module or class, as its engine for Megatron does."""
    importlib.import_module("verl.models.mcore")
    yield "import verl.models.mcore"
    patches = importlib.import_module("verl.models.mcore.patch")
    for name in (
        "apply_patch",
        "apply_patch_mbridge",
        "apply_mtp_inference_patch",
        "apply_patch_megatron_recomputation_backward",
    ):
        getattr(patches, name)()
        yield f"{name}()"
    importlib.import_module("verl.utils.megatron.router_replay_patch").apply_router_replay_patch()
    yield "apply_router_replay_patch()"


def mcore_bridge() -> Iterator[str]:
    """Import mcore-bridge, which applies its patches, and its models, which are subclasses of Megatron's."""
    importlib.import_module("mcore_bridge")
    yield "import mcore_bridge"
    importlib.import_module("mcore_bridge.model")
    importlib.import_module("mcore_bridge.bridge")
    yield "import mcore_bridge.model"


def megatron_bridge() -> Iterator[str]:
    """Import Megatron-Bridge, which applies its patches and imports its models."""
    importlib.import_module("megatron.bridge")
    yield "import megatron.bridge"


def modelopt() -> Iterator[str]:
    """Import ModelOpt and its plugins for Megatron, which register subclasses."""
    importlib.import_module("modelopt.torch.opt")
    quantization = importlib.import_module("modelopt.torch.quantization.plugins.megatron")
    yield "import modelopt.torch.quantization"
    quantization.keep_gpt_output_layer_extra_state()
    yield "keep_gpt_output_layer_extra_state()"
    for name in ("nas", "speculative", "distill", "sparsity", "prune"):
        importlib.import_module(f"modelopt.torch.{name}")
    importlib.import_module("modelopt.torch.speculative.plugins.megatron_eagle")
    yield "import modelopt.torch.nas, speculative, distill, sparsity, prune"


def liger_in_megatron() -> Iterator[str]:
    """Apply every patch that Liger has for Megatron."""
    apply = importlib.import_module("liger_kernel.megatron").apply_liger_kernel_to_megatron
    every = {name: True for name, each in inspect.signature(apply).parameters.items() if isinstance(each.default, bool)}
    apply(**every)
    yield f"apply_liger_kernel_to_megatron({', '.join(f'{name}=True' for name in every)})"


def liger_in_transformers() -> Iterator[str]:
    """Apply Liger's patches of Transformers, each as it is by default, where the models that it is about are there."""
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    names = [name for name in vars(patches) if name.startswith("apply_liger_kernel_to_")]
    applied = []
    for name in names:
        with contextlib.suppress(ImportError, AttributeError):  # models of another release of Transformers
            getattr(patches, name)()
            applied.append(name)
    yield f"{len(applied)} of {len(names)} apply_liger_kernel_to_...()"
    patches.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False)
    yield "apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False)"


LIBRARIES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "verl": ("verl", verl),
    "mcore-bridge": ("mcore_bridge", mcore_bridge),
    "megatron-bridge": ("megatron.bridge", megatron_bridge),
    "nvidia-modelopt": ("modelopt", modelopt),
    "liger-kernel, Megatron": ("liger_kernel.megatron", liger_in_megatron),
    "liger-kernel, Transformers": ("liger_kernel.transformers", liger_in_transformers),
}
"""By name: the package whose code replaces names, and its patches in the order in which they are applied."""

READ_IN_SOURCE = {
    "verl": (
        "`patch_postprocess`, `patch_mtp_layer_get_embeddings` and `patch_mtp_layer_checkpointed_forward` put methods on one model "
        "and its layers. The last passes by the seam of `explicit-tp-groups` in `MultiTokenPredictionLayer._checkpointed_forward`, and "
        "saves activations with the default tensor-parallel group.",
        "`patch_fused_forward(model)` puts a `forward` on one `GPTModel` where the class takes no `output_processor`.",
        "`apply_patch` replaces methods of latent attention up to megatron-core 0.12 alone, and on a Megatron with "
        "`TopKRouter._hash_routing` the router's patch wraps that and leaves `routing` as it is.",
    ),
    "mcore-bridge": (
        "Three names are replaced for the time of a call and put back: `rope_utils._apply_rotary_pos_emb_bshd`, "
        "`VocabParallelEmbedding.forward` and, while a model is built, `gpt_model.TransformerBlock`. None matters to an overlay.",
        "`python -m mcore_bridge.tools.apply_megatron_patch` edits the files of an installed dev tree. Probes read the files as "
        "they are then.",
    ),
    "megatron-bridge": (
        "A model of Gemma 4 with embeddings per layer replaces `transformer_block.checkpointed_forward` for the time of its "
        "decoder's forward pass, which passes by the seam of `explicit-tp-groups` in `megatron.core.recompute` there.",
        "`megatron_mimo` sets process groups in `parallel_state`.",
    ),
    "nvidia-modelopt": (
        "Quantizing, pruning or distilling a model changes the class of its modules to a registered subclass, on that model alone.",
        "An export of Eagle replaces `TEDotProductAttention.forward` for the time of a call and puts it back.",
    ),
}
"""By library: replacements that its source makes outside of its import and its patches, which the processes here do not see."""
