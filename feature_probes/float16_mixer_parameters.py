"""Marks on the parameters that the Mamba mixers of Megatron create in fp32 "to keep" them there.

`MambaMixer` creates `A_log` and `D` in fp32 in every release and tree read: 0.13.0 to 0.19.2, main and dev. The gated
delta product, on main only, does so with `A_log`. Nothing marks them, so `Float16Module` casts them with everything
else. The gated delta net is left out: it creates `A_log` and `dt_bias` in `params_dtype`, so there are no bits to keep.

The verdict rests on the constructor, on every method that reads the parameters or did so in a release, on the code that slices them for context parallelism,
and on `float16-fp32-exemption`, which honours the marks. Kernels take `D` of any dtype (mamba-ssm 2.3.2.post1, megatron-core 0.19.2).
"""

from __future__ import annotations

from collections.abc import Callable

from megacpp_overlays.feature_probes import float16_fp32_exemption
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source import forms
from megacpp_overlays.source.findings import finding_of, unrecognised
from megacpp_overlays.source.trees import SourceTree

UNMARKED = "unmarked-fp32-parameters"


MAMBA = Target("megatron-core", "megatron.core.ssm.mamba_mixer", "MambaMixer.__init__")
GATED_DELTA_PRODUCT = Target(
    "megatron-core", "megatron.core.ssm.gated_delta_product", "GatedDeltaProductMixer.__init__"
)


def _probe_of(target: Target) -> Callable[[SourceTree], Finding]:
    """Return the probe of a mixer that does not mark its fp32 parameters."""
    name = target.symbol.partition(".")[0]

    def ask(tree: SourceTree) -> Finding:
        without = {f"{target.module}:{name}": f"{target.module} defines no {name}"}
        found = forms.finding("float16-mixer-parameters", target, tree, without)
        if found.verdict is not Verdict.ABSENT:
            cast = finding_of(float16_fp32_exemption.probe, tree)
            if cast.verdict not in {Verdict.BROKEN, Verdict.FIXED}:
                return unrecognised(Evidence(seen="nothing that is known would honour the marks"), *cast.evidence)
        return found

    return ask


probe_mamba, probe_gated_delta_product = _probe_of(MAMBA), _probe_of(GATED_DELTA_PRODUCT)
