"""May the tuner of the Mamba-3 SISO forward kernel choose more than one stage on Blackwell, and is what it chooses right?

On compute capability 10 and 12 more than one stage of software pipelining is reported to corrupt the output without an
error. What the tuner may choose can be asked anywhere: it is given the capability of a Blackwell. What the choices
compute needs the device: each is compared with float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays import gpus
from megacpp_overlays.model import Target
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

MODULE = "mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd"
KERNEL = "mamba3_siso_fwd_kernel"
BLACKWELL = ((10, 0), (10, 3), (12, 0))
MAJORS = frozenset(major for major, _ in BLACKWELL)
LIMIT = 0.05
"""Relative error (Frobenius norm) that upstream's own test allows; what bf16 loses is far below it."""


def _choices() -> Behaviour:
    """Ask the tuner what it would choose among on each Blackwell."""
    there = gpus.capabilities()
    if there is not None and not any(major in MAJORS for major, _ in there):
        raise TargetAbsent("this host has GPUs, and none of compute capability 10 or 12")
    kernel = getattr(_import(), KERNEL)
    stages = {capability: sorted({each.num_stages for each in _candidates(kernel, capability)}) for capability in BLACKWELL}
    seen = "; ".join(
        f"compute capability {major}.{minor}: stages {', '.join(map(str, found))}"
        for (major, minor), found in stages.items()
    )
    return Behaviour(broken=any(found != [1] for found in stages.values()), seen=f"the tuner may choose, for {seen}")


def _candidates(kernel: Any, capability: tuple[int, int]) -> list[Any]:
    """Return the configurations that the tuner would try on a device of a capability."""
    import torch

    if kernel.early_config_prune is None:
        return list(kernel.configs)
    real = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *_: capability
    try:
        return list(kernel.early_config_prune(kernel.configs, {"Q": SimpleNamespace(device="cuda:0")}))
    finally:
        torch.cuda.get_device_capability = real


def _on_blackwell() -> Behaviour:
    import torch

    capability = torch.cuda.get_device_capability()
    if capability[0] not in MAJORS:
        raise Blocked(f"needs compute capability 10 or 12, and this is {capability[0]}.{capability[1]}")
    return _measure(capability, registers=(None, 128, 256), batch=16, heads=32)


def _elsewhere() -> Behaviour:
    import torch

    capability = torch.cuda.get_device_capability()
    if capability[0] in MAJORS:
        raise Blocked("this is a Blackwell; the other case measures it")
    return _measure(capability, registers=(None,), batch=4, heads=8)


def _measure(capability: tuple[int, int], *, registers: tuple[int | None, ...], batch: int, heads: int) -> Behaviour:
    """Run the kernel with each configuration that the tuner may choose, and compare the output with float64."""
    import torch
    import triton

    module = _import()
    kernel = getattr(module, KERNEL)
    given = inputs("cuda", batch=batch, steps=2048, heads=heads, groups=heads // 4, state=128, head=64)
    exact = reference(given)
    errors: dict[int, list[float]] = {}
    refused = 0
    for configuration in _candidates(kernel, capability):
        if configuration.maxnreg not in registers:
            continue
        kernel.configs = [configuration]  # with one there is nothing to tune
        kernel.cache.clear()
        try:
            out = module.mamba3_siso_fwd(**given, chunk_size=64)[0]
        except triton.runtime.errors.OutOfResources:
            refused += 1  # the tuner leaves such a configuration out, too
            continue
        torch.cuda.synchronize()
        error = float((out.double() - exact).norm() / exact.norm())
        errors.setdefault(configuration.num_stages, []).append(error)
    if not errors:
        raise RuntimeError("no configuration could be launched")
    worst = max(max(found) for found in errors.values())
    said = ", ".join(
        f"{stages} stages {min(found):.2e} to {max(found):.2e} ({len(found)} configurations)"
        for stages, found in sorted(errors.items())
    )
    return Behaviour(
        broken=not worst < LIMIT,
        seen=f"compute capability {capability[0]}.{capability[1]}, Triton {triton.__version__}: relative error of the output "
        f"against float64: {said}; {refused} did not fit the device",
    )


def inputs(
    device: str, *, batch: int, steps: int, heads: int, groups: int, state: int, head: int
) -> dict[str, Any]:
    """Return inputs of upstream's forward by its names, all of them of moderate size."""
    import torch

    generator = torch.Generator().manual_seed(19)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

    low = torch.bfloat16
    return {
        "Q": normal(batch, steps, groups, state, scale=0.3, dtype=low),
        "K": normal(batch, steps, groups, state, scale=0.3, dtype=low),
        "V": normal(batch, steps, heads, head, dtype=low),
        "ADT": (-0.01 - 0.1 * torch.rand(batch, heads, steps, generator=generator)).to(device),
        "DT": (0.1 + 0.4 * torch.rand(batch, heads, steps, generator=generator)).to(device),
        "Trap": normal(batch, heads, steps, dtype=low),
        "Q_bias": normal(heads, state, scale=0.3),
        "K_bias": normal(heads, state, scale=0.3),
        "Angles": normal(batch, steps, heads, state // 4),
        "D": normal(heads),
        "Z": normal(batch, steps, heads, head, dtype=low),
    }


def reference(given: dict[str, Any]) -> Any:
    """Return the output in float64, step by step: decay the state, read it, and add what this step leaves in it."""
    import torch

    exact = {name: value.double() for name, value in given.items()}
    batch, steps, heads, head = exact["V"].shape
    repeat = heads // exact["Q"].shape[2]
    plain_q, plain_k = (
        exact[name].repeat_interleave(repeat, dim=2) + exact[f"{name}_bias"] for name in ("Q", "K")
    )  # [batch, steps, heads, state]
    q, k = _turned(plain_q, exact["Angles"]), _turned(plain_k, exact["Angles"])
    weight = exact["Trap"].sigmoid()
    own = exact["DT"] * weight
    later = torch.zeros_like(own)
    later[..., :-1] = exact["DT"][..., 1:] * (1 - weight[..., 1:])
    decay = exact["ADT"].exp()
    state = torch.zeros(batch, heads, q.shape[-1], head, dtype=torch.double, device=q.device)
    outputs = torch.empty_like(exact["V"])
    for step in range(steps):
        value = exact["V"][:, step]
        state = state * decay[:, :, step, None, None]
        same = (plain_q[:, step] * plain_k[:, step]).sum(-1) * own[:, :, step] + exact["D"]
        outputs[:, step] = torch.einsum("bhn,bhnp->bhp", q[:, step], state) + same[..., None] * value
        left = k[:, step] * (own + later)[:, :, step, None]
        state = state + left[..., None] * value[:, :, None]
    return outputs * torch.nn.functional.silu(exact["Z"])


def _turned(value: Any, angles: Any) -> Any:
    """Turn neighbouring pairs; those without an angle stay as they are."""
    import torch

    missing = value.shape[-1] // 2 - angles.shape[-1]
    angles = torch.nn.functional.pad(angles, (0, missing))
    first, second = value[..., 0::2], value[..., 1::2]
    turned = (angles.cos() * first - angles.sin() * second, angles.sin() * first + angles.cos() * second)
    return torch.stack(turned, dim=-1).flatten(-2)


def _import() -> ModuleType:
    """Import the module of the kernel, without what the package imports for Mamba-1.

    Raises:
        Blocked: mamba-ssm, or something that the kernel needs, is not here.
        TargetAbsent: this mamba-ssm has no such kernel.
    """
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise Blocked("mamba-ssm is not installed")
    package = ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["mamba_ssm"] = package
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = ModuleType("einops")
        sys.modules["einops"].rearrange = sys.modules["einops"].repeat = None  # the forward does not call them
    try:
        if importlib.util.find_spec(MODULE) is None:
            raise TargetAbsent(f"there is no {MODULE}")
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mamba_ssm"):
            raise TargetAbsent(f"there is no {error.name}") from error
        raise Blocked(f"{MODULE} cannot be imported: {error}") from error
    return module


_GATE = "mamba3-siso-pipelining"
_VERSIONS = ("mamba-ssm", "torch", "triton")
CASES = (
    Case(name="tuner-choices", overlay=_GATE, device="cpu", versions=_VERSIONS, run=_choices),
    Case(name="blackwell", overlay=_GATE, device="cuda", versions=_VERSIONS, run=_on_blackwell),
    Case(
        name="elsewhere",
        overlay=None,
        claim="on other devices than Blackwell every number of stages is right",
        about=(Target("mamba-ssm", MODULE, KERNEL),),
        device="cuda",
        versions=_VERSIONS,
        run=_elsewhere,
    ),
)
