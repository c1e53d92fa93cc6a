"""fp32 marks for `A_log` and `D` of Megatron's own Mamba mixers: off unless its variable is `on`.

The constructors create them in fp32, with a comment to keep them so, and `Float16Module` casts them with all other
parameters. After upstream's constructor this overlay marks them with `keep_in_fp32`. Marked parameters are not cast: up
to 0.19.2 by the overlay `float16-fp32-exemption`, without which marks have no effect there; on main and dev by
`Float16Module` itself. All code of the mixers that reads the two takes fp32 with half-precision activations; the probe
knows each place.

It is off by default because it changes training and checkpoints:
    A checkpoint then has the two in fp32. Model weights load with and without the overlay, and a run without it rounds
    them. Optimizer state of `Float16OptimizerWithFloat16Params` from a run without the overlay loads into a run with it,
    but not the reverse: a run without it asks for an fp32 copy that was not saved. See pack 21.
    The fp32 parameters get a gradient buffer of their own, and CPU offload refuses them up to 0.19.2 (see
    `float16-fp32-exemption`).
The gain is small: `benchmarks/results/mixer_parameters.md`. Half precision moves a decay rate by up to 0.8 percent; both
optimizers keep an fp32 copy of each parameter that is cast, so no update is lost without the overlay.

The gated delta net creates its own `A_log` and `dt_bias` in `params_dtype`, so it needs no marks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes import float16_mixer_parameters as feature
from megacpp_overlays.fp32_marks import MARK, keep_in_fp32
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.model import Finding, Observation, Overlay, Replacement, Target, Thread
from megacpp_overlays.runtime.in_this_thread import Instead, answer
from megacpp_overlays.source.trees import SourceTree


class Mixer(NamedTuple):
    """A mixer, and the parameters that it creates in fp32."""

    target: Target
    parameters: tuple[str, ...]

    @property
    def class_name(self) -> str:
        """Return the name of the mixer's class."""
        return self.target.symbol.partition(".")[0]


MAMBA = Mixer(feature.MAMBA, ("A_log", "D"))
GATED_DELTA_PRODUCT = Mixer(feature.GATED_DELTA_PRODUCT, ("A_log",))


def _make_marking(names: tuple[str, ...]) -> Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]:
    def make(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
        import torch

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a constructor
            original(self, *args, **kwargs)
            for name in names:
                if getattr(self, name).dtype is torch.float32:
                    keep_in_fp32(getattr(self, name))

        return __init__

    return make


def observe(module: ModuleType, mixer: Mixer, *, unbuilt: bool) -> Observation:
    """Build a small mixer on the CPU, and look for the marks of its fp32 parameters.

    Args:
        module: the target.
        mixer: which of its classes.
        unbuilt: the answer where no mixer can be built, because the constructor lacks an import.
    """
    import torch

    try:
        with _on_the_cpu(module), torch.random.fork_rng(devices=[]):
            built = _build(module, mixer)
    except ImportError as error:
        return Observation(broken=unbuilt, seen=f"no {mixer.class_name} can be built here: {error}")
    fp32 = [name for name in mixer.parameters if getattr(built, name).dtype is torch.float32]
    marked = [name for name in fp32 if getattr(getattr(built, name), MARK, False)]
    seen = f"{len(marked)} of {len(fp32)} fp32 parameters of a {mixer.class_name} are marked"
    return Observation(broken=not fp32 or marked != fp32, seen=seen)


def _build(module: ModuleType, mixer: Mixer) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Projection(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(0, device="cpu"))
            self.bias = None

    cls = getattr(module, mixer.class_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0.19.2 warns about its own defaults
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=1,
            mamba_state_dim=8,
            mamba_num_heads=4,
            mamba_head_dim=8,
            mamba_num_groups=1,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    submodules = getattr(module, f"{mixer.class_name}Submodules")(in_proj=Projection, out_proj=Projection)
    # Until 0.14.0 the groups had another name.
    names = inspect.signature(cls.__init__).parameters
    groups = "model_comm_pgs" if "model_comm_pgs" in names else "pg_collection"
    return cls(config, submodules, 16, layer_number=1, **{groups: SimpleNamespace(tp=group, cp=group)})


@contextlib.contextmanager
def _on_the_cpu(module: ModuleType) -> Iterator[None]:
    """Let constructors of a module build on the CPU in this thread, without a call to CUDA."""
    names = vars(module)
    torch, tracker = names["torch"], names["get_cuda_rng_tracker"]
    cuda = Instead(torch.cuda, current_device=answer(lambda: "cpu", torch.cuda.current_device))
    names["torch"] = Instead(torch, cuda=cuda)
    names["get_cuda_rng_tracker"] = answer(lambda: SimpleNamespace(fork=contextlib.nullcontext), tracker)
    try:
        yield
    finally:
        names["torch"], names["get_cuda_rng_tracker"] = torch, tracker


def _part(mixer: Mixer, probe: Callable[[SourceTree], Finding]) -> Overlay:
    return Overlay(
        id="float16-mixer-parameters",
        pack=21,
        title="Megatron's own Mamba mixers keep A_log and D in fp32",
        target=mixer.target,
        probe=probe,
        replacements={
            feature.UNMARKED: (Replacement(symbol=mixer.target.symbol, make=_make_marking(mixer.parameters)),),
        },
        unsupported={},
        witness=functools.partial(observe, mixer=mixer, unbuilt=True),
        self_test=functools.partial(observe, mixer=mixer, unbuilt=False),
        opt_in=True,
        needs=("float16-optimizer-state-ids", "float16-distributed-order"),
        symptoms=(
            "A_log and D of Mamba are bf16",
            "Mamba loses precision in a bf16 model",
        ),
        concerns="half and (mamba_mixer or gated_delta)",
        breaks="A_log and D of a Mamba mixer, created in fp32 to keep them so, are rounded when the model is wrapped",
        brief="A_log and D that are rounded",
        until="mixers mark their fp32 parameters",
        retire_when="every Mamba mixer of Megatron that creates parameters in fp32 marks them with keep_in_fp32",
        threads=(
            Thread(
                repository="NVIDIA/Megatron-LM", number=5929, state="merged to main 2026-08-10: marks, none set here"
            ),
            Thread(repository="radixark/miles", number=975, state="merged, opened 2026-04-13: A_log of a Qwen in fp32"),
            Thread(
                repository="EleutherAI/DeeperSpeed", number=61, state="merged, opened 2024-03-07: A_log and D in fp32"
            ),
        ),
        last_validated="2026-11-21, H200, torch 2.11.0+cu130, megatron-core 0.19.2 with mamba-ssm 2.3.2.post1: a mixer, a small hybrid model and "
        "checkpoints; x86-64 without GPU: megatron-core 0.14.0, 0.16.1, 0.17.1, 0.18.2, 0.19.2, main d98e8a64dd and "
        "dev d48bd6be0a loaded, checkpoints of 0.19.2 through files; 0.13.0 to 0.19.2 read",
    )


PARTS = (
    _part(MAMBA, feature.probe_mamba),
    _part(GATED_DELTA_PRODUCT, feature.probe_gated_delta_product),
)
