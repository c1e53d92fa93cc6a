"""Probe whether an offloaded optimizer refreshes the copies that it steps from when weights are loaded into its model.

Where its optimizer is a `HybridDeviceOptimizer`, `DistributedOptimizer` returns before it copies the model's weights to main weights. At most it
refreshes fp32 copies. The seam copies to main weights as for any other optimizer, and then refreshes every copy that the hybrid optimizer steps from.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5071
"""

from __future__ import annotations

from megacpp_overlays.errors import SourceError
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.definitions import plain_class, plain_function, words
from megacpp_overlays.source.findings import absent, at, broken, unknown
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import SourceTree

CLASS, HYBRID = "DistributedOptimizer", "HybridDeviceOptimizer"
METHOD, UPDATE = f"{CLASS}._copy_model_params_to_main_params", f"{HYBRID}.update_fp32_param_by_new_param"
TARGET = Target(distribution="megatron-core", module="megatron.core.optimizer.distrib_optimizer", symbol=METHOD)
COPIES = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
STALE = "copies-not-refreshed"

_HYBRID = Pattern("if isinstance(self.optimizer, HybridDeviceOptimizer): $$_")
_RETURNS = (
    Pattern("if isinstance(self.optimizer, HybridDeviceOptimizer): return"),
    Pattern("""
if isinstance(self.optimizer, HybridDeviceOptimizer):
    self.optimizer.update_fp32_param_by_new_param()
    return
"""),
)
_MAINS = Pattern("copy_group_params(self.model_float16_groups, self.shard_fp32_from_float16_groups)")
_FP32 = Pattern("""
def update_fp32_param_by_new_param(self):
    for $given, $copy in self.param_to_fp32_param.items():
        $copy.data.copy_($given)
""")
_INNER = Pattern("""
if $given in self.param_to_fp32_param:
    $inner = self.param_to_fp32_param[$given]
elif $given in self.gpu_params_map_cpu_copy:
    $inner = self.gpu_params_map_cpu_copy[$given]
else:
    $inner = $given
""")
_KEPT = Pattern("self.param_to_inner_param[$given] = $inner")


def probe(tree: SourceTree) -> Finding:
    """Return whether loaded weights reach no copy."""
    source, hybrid = tree.module(TARGET.module), tree.module(COPIES)
    if source is None or plain_class(source, CLASS) is None:
        return absent(f"there is no {TARGET.module}.{CLASS}", source)
    method = plain_function(source, METHOD)
    if method is None:
        raise unknown(source, None, f"{METHOD} is not a plain method")
    if hybrid is None and HYBRID not in words(source.syntax):
        if not any(_MAINS.find(method)):
            raise unknown(source, method, "main weights are copied otherwise")
        return absent("no optimizer is offloaded", source)
    found = [each.node for each in _HYBRID.find(method) if each.node in method.body]
    if hybrid is None or len(found) != 1 or not any(_MAINS.find(method)):
        raise unknown(source, method, "weights are copied otherwise")
    if not any(any(each.find(found[0])) for each in _RETURNS):
        raise unknown(source, found[0], "more is done for an offloaded optimizer")
    update, made = plain_function(hybrid, UPDATE), plain_function(hybrid, f"{HYBRID}._init_sub_optimizers")
    if update is not None and not _FP32.match(update):
        raise unknown(hybrid, update, "more than fp32 copies is refreshed")
    if made is None or not any(_INNER.find(made)) or not any(_KEPT.find(made)):
        raise SourceError(f"{HYBRID} does not keep what it steps from", file=hybrid.path)
    return broken(STALE, at(source, found[0], "main weights of an offloaded optimizer are not taken from the model"))
