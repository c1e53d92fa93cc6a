"""Marks on the parameters that the Mamba mixers of Megatron create in fp32 "to keep" them there.

`MambaMixer` creates `A_log` and `D` in fp32 in every release and tree read: 0.13.0 to 0.19.2, main and dev. The gated
delta product, on main only, does so with `A_log`. Nothing marks them, so `Float16Module` casts them with everything
else. The gated delta net is left out: it creates `A_log` and `dt_bias` in `params_dtype`, so there are no bits to keep.

Whether anything honours marks is the matter of `float16-fp32-exemption`; where its probe recognises nothing, neither does this one.

The verdict rests on the constructor, on every method that reads the parameters or did so in a release, and on what slices them for
context parallelism. Kernels take `D` of any dtype: they load it as fp32 and return its gradient in its own dtype (mamba-ssm 2.3.2.post1,
megatron-core 0.19.2).
"""

from __future__ import annotations

from megacpp_overlays.feature_probes import float16_fp32_exemption
from megacpp_overlays.feature_probes.findings import finding_of, unrecognised
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.model import Evidence, Finding, Target, Verdict
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

UNMARKED = "unmarked-fp32-parameters"


class Mixer(NamedTuple):
    """A mixer, and the parameters that it creates in fp32."""

    target: Target
    parameters: tuple[str, ...]

    @property
    def class_name(self) -> str:
        """Return the name of the mixer's class."""
        return self.target.symbol.partition(".")[0]


MAMBA = Mixer(Target("megatron-core", "megatron.core.ssm.mamba_mixer", "MambaMixer.__init__"), ("A_log", "D"))
GATED_DELTA_PRODUCT = Mixer(
    Target("megatron-core", "megatron.core.ssm.gated_delta_product", "GatedDeltaProductMixer.__init__"), ("A_log",)
)


def probe_mamba(tree: SourceTree) -> Finding:
    """Return whether `MambaMixer` marks `A_log` and `D`."""
    return _probe(tree, MAMBA)


def probe_gated_delta_product(tree: SourceTree) -> Finding:
    """Return whether `GatedDeltaProductMixer` marks `A_log`."""
    return _probe(tree, GATED_DELTA_PRODUCT)


def _probe(tree: SourceTree, mixer: Mixer) -> Finding:
    without = {f"{mixer.target.module}:{mixer.class_name}": f"{mixer.target.module} defines no {mixer.class_name}"}
    found = forms.finding("float16-mixer-parameters", mixer.target, tree, without)
    if found.verdict is not Verdict.ABSENT:
        cast = finding_of(float16_fp32_exemption.probe, tree)
        if cast.verdict not in {Verdict.BROKEN, Verdict.FIXED}:
            return unrecognised(Evidence(seen="nothing that is known would honour the marks"), *cast.evidence)
    return found
