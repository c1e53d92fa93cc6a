"""Random streams of experts in checkpoints of `megatron.training`, where one rank saves its own stream for all that share its pipeline and tensor rank.

`get_rng_state` makes all ranks of a data and context parallel group replicas of one object, though their expert streams differ. The seam adds the streams of all ranks to its
result, and each rank finds its own in the result of `_load_base_checkpoint`. So states must be in a list of one dictionary, which is read by names.

Source: https://github.com/NVIDIA/Megatron-LM/pull/6858
"""

from __future__ import annotations

import ast

from megacpp_overlays.errors import SourceError
from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source.definitions import plain_function
from megacpp_overlays.source.findings import absent, at, broken, unknown
from megacpp_overlays.source.patterns import Pattern
from megacpp_overlays.source.trees import SourceTree

SAVED, READ = "get_rng_state", "_load_base_checkpoint"
TARGET = Target(distribution="megatron-core", module="megatron.training.checkpointing", symbol=SAVED)
STREAMS = "megatron.core.tensor_parallel.random"
SEED = "model_parallel_cuda_manual_seed"
REPLICAS = "one-of-replicas"

_STATES = Pattern("tensor_parallel.get_cuda_rng_tracker().get_states()")
_ONE = Pattern("$states = [$state]")
_SHARDED = Pattern("$states = ShardedObject($_, $states, (pp_size, tp_size), (pp_rank, tp_rank), replica_id=$replica)")
_REPLICA = {"dp_cp_rank", "mpu.get_data_parallel_rank(with_context_parallel=True)"}
_BASE = Pattern("state_dict, checkpoint_name, release, ckpt_type = _load_base_checkpoint($$_)")
_FIRST = Pattern("rng_state = rng_state[0]")
_TAKEN = Pattern("rng_state['rng_tracker_states'].items()")
_SET = Pattern("cuda_rng_tracker.set_states(rng_tracker_states)")
_SEED = Pattern("$_.add(_EXPERT_PARALLEL_RNG_TRACKER_NAME, $seed)")


def probe(tree: SourceTree) -> Finding:
    """Return whether expert ranks share the stream that one of them saved."""
    source, streams = tree.module(TARGET.module), tree.module(STREAMS)
    method = plain_function(source, SAVED) if source else None
    if source is None or method is None:
        return absent(f"there is no {TARGET.module}.{SAVED}", source)
    base = plain_function(source, READ)
    seeds = plain_function(streams, SEED) if streams else None
    if seeds is None or not any(_SEED.find(seeds)):
        raise SourceError("streams of experts are seeded otherwise", file=source.path)
    if base is None or not all(any(each.find(source.syntax)) for each in (_BASE, _FIRST, _TAKEN, _SET)):
        raise unknown(source, base, "what was saved is taken over otherwise")
    if "sharded_state_dict" not in {each.arg for each in base.args.args}:
        raise unknown(source, base, f"{READ} is not given the states of this process")
    found = [each for each in _SHARDED.find(method) if each.text("replica") in _REPLICA]
    if len(found) != 1 or "expert" in ast.unparse(method):
        raise unknown(source, method, "states are saved for other ranks")
    if not any(_ONE.find(method)) or not any(_STATES.find(method)):
        raise unknown(source, method, "other states are saved")
    return broken(REPLICAS, at(source, found[0].node, "ranks that differ in their expert stream are replicas"))
