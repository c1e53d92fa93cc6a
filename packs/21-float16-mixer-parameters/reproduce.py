"""Megatron's own Mamba mixers: do `A_log` and `D`, created in fp32, stay fp32 when the model is wrapped?

One defect in two modules: `MambaMixer` (every release and tree) and `GatedDeltaProductMixer` (main). Each case builds a
real mixer, gives its fp32 parameters the values of a trained one, and wraps it in `Float16Module`. The overlay is off by
default; the runner switches it on for its second run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

MAMBA = "megatron.core.ssm.mamba_mixer"
GATED_DELTA_PRODUCT = "megatron.core.ssm.gated_delta_product"
HIDDEN = 256


def _mamba_on_cpu() -> Behaviour:
    mixer, what = _build(MAMBA, "MambaMixer", ("A_log", "D"), device="cpu")
    return _wrap_and_compare(mixer, what, ("A_log", "D"))


def _gated_delta_product_on_cpu() -> Behaviour:
    mixer, what = _build(GATED_DELTA_PRODUCT, "GatedDeltaProductMixer", ("A_log",), device="cpu")
    return _wrap_and_compare(mixer, what, ("A_log",))


def _mamba_on_gpu() -> Behaviour:
    """Run a real mixer with real kernels before and after it is wrapped."""
    import torch

    _let_kernels_be_imported()
    names = ("A_log", "D")
    mixer, what = _build(MAMBA, "MambaMixer", names, device="cuda")
    if not sys.modules[MAMBA].HAVE_MAMBA_SSM_FOR_REAL:
        raise Blocked("mamba-ssm is not installed, or its kernels cannot be imported here")
    _take_one_configuration()
    inputs = torch.randn(256, 2, HIDDEN, generator=torch.Generator().manual_seed(3)).cuda().bfloat16()
    with torch.no_grad():
        expected, _ = mixer(inputs)
    seen = _wrap_and_compare(mixer, what, names)
    output, _ = mixer(inputs)
    output.float().pow(2).mean().backward()
    torch.cuda.synchronize()
    gradients = {name: getattr(mixer, name).grad for name in names}
    usable = [
        name
        for name, value in gradients.items()
        if value is not None and value.dtype is torch.float32 and bool(torch.isfinite(value).all())
    ]
    changed = float((output.detach().float() - expected.float()).abs().max())
    words = f"{seen.seen}; output changed by {changed:.1e} of {float(expected.abs().max()):.1e}"
    words += f"; finite fp32 gradients for {len(usable)} of {len(names)}"
    return Behaviour(broken=seen.broken or len(usable) < len(names), seen=words)


def _build(module_name: str, class_name: str, names: tuple[str, ...], *, device: str) -> tuple[Any, str]:
    """Return a real mixer with trained values in its fp32 parameters, and what it is in words.

    Raises:
        TargetAbsent: this Megatron has no such mixer.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    if importlib.util.find_spec(module_name) is None:
        raise TargetAbsent(f"there is no {module_name}")
    module = importlib.import_module(module_name)
    cls = getattr(module, class_name, None)
    if cls is None:
        raise TargetAbsent(f"{module_name} has no {class_name}")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        mamba_state_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        mamba_num_groups=1,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    config.use_mamba_mem_eff_path = False  # the path that does without causal-conv1d

    class Projection(torch.nn.Module):  # type: ignore[misc] # torch is not seen by the type checker
        """A linear layer that answers as Megatron's do, without process groups."""

        def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / 16)
            self.bias = None

        def forward(self, values: Any) -> Any:
            return torch.nn.functional.linear(values, self.weight), None

    torch.manual_seed(1)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = "model_comm_pgs" if "model_comm_pgs" in inspect.signature(cls.__init__).parameters else "pg_collection"
    submodules = getattr(module, f"{class_name}Submodules")(in_proj=Projection, out_proj=Projection)
    with _without_kernels_and_ranks(module, device) as what:
        mixer = cls(config, submodules, HIDDEN, layer_number=1, **{groups: SimpleNamespace(tp=group, cp=group)})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name in names:
            value = getattr(mixer, name)
            if value.dtype is not torch.float32:
                raise TargetAbsent(f"{class_name} creates {name} as {value.dtype}")
            # A new D is 1, which bf16 can hold. A trained value is not so lucky.
            value += 0.05 * torch.randn(value.shape, generator=generator).to(device)
    return mixer, f"a {class_name} {what}"


@contextlib.contextmanager
def _without_kernels_and_ranks(module: ModuleType, device: str) -> Iterator[str]:
    """Let a constructor build on a device without a random state for each rank, and without kernels that it does not run.

    It refuses where mamba-ssm, einops or flash-linear-attention cannot be imported, and uses none of them but the norm.
    """
    import torch

    real = getattr(module, "HAVE_MAMBA_SSM", False)
    replaced: dict[str, Any] = {
        "HAVE_MAMBA_SSM": True,
        "HAVE_EINOPS": True,
        "HAVE_FLA": True,
        "check_fla_sequence_packing_support": lambda: (True, ""),
        "get_cuda_rng_tracker": lambda: SimpleNamespace(fork=contextlib.nullcontext),
    }
    parallel = {MAMBA: "mamba_context_parallel", GATED_DELTA_PRODUCT: "gdp_context_parallel"}[module.__name__]
    owners = [module, importlib.import_module(f"megatron.core.ssm.{parallel}")]
    vars(module).setdefault("chunk_gated_delta_product", None)  # chosen when it is built, called when it runs
    places = [(owner, name) for owner in owners for name in replaced if hasattr(owner, name)]
    before = [getattr(owner, name) for owner, name in places]
    current_device = torch.cuda.current_device
    try:
        for owner, name in places:
            setattr(owner, name, replaced[name])
        if device == "cpu":
            torch.cuda.current_device = lambda: torch.device("cpu")
        yield "with the kernels of mamba-ssm" if real else "without kernels"
    finally:
        torch.cuda.current_device = current_device
        for (owner, name), value in zip(places, before, strict=True):
            setattr(owner, name, value)
        module.HAVE_MAMBA_SSM_FOR_REAL = real  # type: ignore[attr-defined]


def _wrap_and_compare(mixer: Any, what: str, names: tuple[str, ...]) -> Behaviour:
    import torch
    from megatron.core.transformer.module import Float16Module

    before = {name: getattr(mixer, name).detach().clone() for name in names}
    Float16Module(SimpleNamespace(fp16=False, bf16=True, virtual_pipeline_model_parallel_size=None), mixer)
    after = {name: getattr(mixer, name) for name in names}
    cast = [name for name, value in after.items() if value.dtype is not torch.float32]
    changed = sum(int((value.double() != after[name].double()).sum()) for name, value in before.items())
    total = sum(value.numel() for value in before.values())
    rates = before["A_log"].double().exp(), after["A_log"].detach().double().exp()
    moved = float((rates[1] / rates[0] - 1).abs().max())
    words = f"{what}, wrapped in Float16Module: {len(cast)} of {len(names)} fp32 parameters cast"
    words += f" ({', '.join(cast)})" if cast else ""
    return Behaviour(
        broken=bool(cast or changed),
        seen=f"{words}, {changed} of {total} values changed, decay rates moved by {moved:.2%} at most",
    )


def _let_kernels_be_imported() -> None:
    """Bypass the package of mamba-ssm where it cannot be imported: it wants transformers and kernels of Mamba-1."""
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise Blocked("mamba-ssm is not installed")
    try:
        importlib.import_module("mamba_ssm")
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]
        package = ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["mamba_ssm"] = package


def _take_one_configuration() -> None:
    """Let each tuned kernel use one configuration, the plainest: it decides about the layout, not about the result."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("mamba_ssm.ops.triton"):
            continue
        for kernel in vars(module).values():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)  # a decorator around the tuner
            if len(getattr(kernel, "configs", ())) > 1:
                kernel.configs = [min(kernel.configs, key=lambda each: (each.num_stages, each.num_warps, str(each)))]


def _case(name: str, device: str, run: Any, target: str, *versions: str) -> Case:
    return Case(
        name=name,
        overlay="float16-mixer-parameters",
        device=device,
        versions=("torch", *versions),
        run=run,
        targets=(target,),
    )


CASES = (
    _case("mamba-cpu", "cpu", _mamba_on_cpu, MAMBA),
    _case("gated-delta-product-cpu", "cpu", _gated_delta_product_on_cpu, GATED_DELTA_PRODUCT),
    _case("mamba-gpu", "cuda", _mamba_on_gpu, MAMBA, "mamba-ssm", "triton"),
)
