"""Restoring of Megatron's schedule of learning rate and weight decay, which adds the saved counter of steps to the present one.

The seam runs `load_state_dict` from a counter of zero and then takes a step of zero. So the method must take one `step` by the saved
number and otherwise copy values, and `step` must count and set the groups of the optimizer: the self-test reads these settings.

Source: https://github.com/NVIDIA/Megatron-LM/pull/7468
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.definitions import called, calls, plain_class, plain_function, ways_out
from megacpp_overlays.source.findings import absent, at, broken, unknown
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import SourceTree

CLASS = "OptimizerParamScheduler"
METHOD = f"{CLASS}.load_state_dict"
TARGET = Target(distribution="megatron-core", module="megatron.core.optimizer_param_scheduler", symbol=METHOD)
ADDED, ADDED_EARLY = "added", "added-early"

_NO_BASES = Pattern(f"class {CLASS}: $$_")
_COUNTER = Pattern("self.num_steps")
_LOAD = Pattern("""
def load_state_dict(self, state_dict):
    $$_
    if 'num_iters' in state_dict:
        $saved = state_dict['num_iters']
    else:
        $saved = state_dict['num_steps']
    $$_
    self.step(increment=$saved)
    $$after
""")
_CALLS = ["_check_and_set", "_restore_param_group_scheduler_overrides", "step"]
_STEP = Pattern("""
def step(self, increment):
    self.num_steps += increment
    $$_
    for param_group in self.optimizer.param_groups: $$_
""")


def probe(tree: SourceTree) -> Finding:
    """Return whether the saved counter is added, and whether that is done before weight decay is restored."""
    source = tree.module(TARGET.module)
    cls = plain_class(source, CLASS) if source else None
    if source is None or cls is None:
        return absent(f"there is no {TARGET.module}.{CLASS}", source)
    method, step = plain_function(source, METHOD), plain_function(source, f"{CLASS}.step")
    if method is None or not _STEP.match(step) or not _NO_BASES.match(cls):
        raise unknown(source, cls, f"{CLASS} is derived, has no load_state_dict, or counts otherwise")
    if any(_COUNTER.find(method)):
        raise unknown(source, method, "load_state_dict knows the counter")
    found = _LOAD.match(method)
    made = sorted(called(each) for each in calls(method))
    if found is None or any(ways_out(method)) or made.count("step") > 1 or not {*made} <= {*_CALLS}:
        raise unknown(source, method, "load_state_dict does more than take values over and step by the saved number")
    added = at(source, method, "the saved counter is added to what is there")
    if not found.many("after"):
        return broken(ADDED, added)
    return broken(ADDED_EARLY, added, at(source, found.many("after")[0], "weight decay is restored after the step"))
