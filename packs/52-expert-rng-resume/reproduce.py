"""Megatron's random streams of experts, saved and loaded: does each expert rank go on with its own?

`save_checkpoint` and `load_checkpoint` of `megatron.training` save and load a model of one weight on two gloo ranks, with arguments from Megatron's parser.
The generator of a GPU is one of the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import queue
import random
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent, on_ranks

MODULE = "megatron.training.checkpointing"
SEED, DRAWN, ITERATION = 1234, 3, 7
EXPERT = "expert-parallel-rng"
EXPERTS: dict[str, int] = {"expert_model_parallel_size": 2}
EXPERT_TENSORS: dict[str, int] = {"expert_tensor_parallel_size": 2}


def resumed(
    sizes: dict[str, int], later: dict[str, int] | None = None, load: dict[str, Any] | None = None, **settings: Any
) -> dict[str, list[float]]:
    """Return what two ranks draw next from each stream, had they gone on after a checkpoint (`on`) and having loaded it (`resumed`), and what they loaded.

    Args:
        sizes: of parallel groups, in names of `initialize_model_parallel`.
        later: of those in which the checkpoint is loaded; the same by default.
        load: other arguments than those under which it was saved.
        settings: arguments of Megatron.
    """
    checkpoints()
    for each in ("megatron.training.arguments", "megatron.training.global_vars"):
        importlib.import_module(each)
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(2, functools.partial(_ranks, folder, sizes, sizes if later is None else later, load or {}, settings))


def checkpoints() -> Any:
    """Return Megatron's module of checkpoints."""
    try:
        return importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {error.name}") from error


def _ranks(
    folder: str, sizes: dict[str, int], later: dict[str, int], load: dict[str, Any], settings: dict[str, Any], rank: int
) -> dict[str, Any]:
    import numpy as np
    import torch
    from megatron.training.global_vars import set_args

    module = checkpoints()
    logging.disable(logging.WARNING)  # in this rank, and some of it goes to standard output
    with _as_if_on_gpu() as draw:
        model, arguments = _begin(sizes, rank), _arguments(folder, sizes, **settings)
        set_args(arguments)
        draw(DRAWN), random.random(), np.random.rand()  # noqa: S311 - Megatron saves these states
        with torch.no_grad():
            model.weight.fill_(float(SEED))
        module.save_checkpoint(ITERATION, [model], None, None, 0)
        found = {f"on, {name}": each for name, each in draw(1).items()}
        model = _begin(later, rank)
        vars(arguments).update({**later, **load})
        iteration, _ = module.load_checkpoint([model], None, None)
        found |= {f"resumed, {name}": each for name, each in draw(1).items()}
    return {**found, "iteration": iteration, "weight": model.weight, "python": random.random(), "numpy": np.random.rand()}  # noqa: S311 - Megatron saves these states


def _begin(sizes: dict[str, int], rank: int) -> Any:
    """Return a new model, in new groups, with streams that have been seeded as Megatron does."""
    import numpy as np
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    model = MegatronModule(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
    model.weight = torch.nn.Parameter(torch.zeros(4))
    return model


def _arguments(folder: str, sizes: dict[str, int], **settings: Any) -> Any:
    """Return Megatron's arguments with their defaults, and what it derives from them."""
    import sys

    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training.arguments import parse_args

    init_num_microbatches_calculator(0, None, 2, 1, 1)

    words, sys.argv = sys.argv, ["train"]
    try:
        arguments = parse_args()
    finally:
        sys.argv = words
    vars(arguments).update(save=folder, load=folder, no_save_optim=True, no_load_optim=True, world_size=2)
    vars(arguments).update({"ckpt_fully_parallel_save": False, "data_parallel_size": 2, **sizes, **settings})
    arguments.use_dist_ckpt = arguments.ckpt_format != "torch"
    arguments.save_tokenizer_assets = False  # main would ask for a tokenizer
    return arguments


@contextlib.contextmanager
def _as_if_on_gpu() -> Iterator[Callable[[int], dict[str, Any]]]:
    """Let a generator of the CPU be that of the GPU, and yield how to draw from each stream of the tracker and from none."""
    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async as writer
    from megatron.core.tensor_parallel import random as streams
    from torch.overrides import TorchFunctionMode

    generator = torch.Generator()

    class OnCpu(TorchFunctionMode):  # type: ignore[misc] # torch is not seen by the type checker
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {}, **({"device": "cpu"} if "cuda" in str((kwargs or {}).get("device")) else {}))
            return function(*args, **given)

    def draw(times: int) -> dict[str, Any]:
        tracker = streams.get_cuda_rng_tracker()
        found = {"none": torch.rand(times, generator=generator)}
        for name in sorted(tracker.get_states()):
            with tracker.fork(name):
                found[name] = torch.rand(times, generator=generator)
        return found

    process = lambda *_: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))  # noqa: E731 - it is logged
    cuda: dict[str, Any] = {"get_rng_state": lambda *_, **__: generator.get_state(), "set_rng_state": generator.set_state}
    instead: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            **cuda,
            "current_device": lambda: torch.device("cpu"),
            "default_generators": {torch.device("cpu"): generator},
            "manual_seed": generator.manual_seed,
            "synchronize": lambda *_: None,
        },
        torch.cuda.random: cuda,
        streams: {"_lazy_call": lambda call: call()},
        writer: {"_results_queue": queue.Queue(), "HAVE_PSUTIL": True, "psutil": SimpleNamespace(Process=process)},
    }
    before = {each: {name: getattr(each, name, None) for name in names} for each, names in instead.items()}
    for each, names in instead.items():
        vars(each).update(names)
    try:
        with OnCpu(), open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            yield draw
    finally:
        for each, names in before.items():
            vars(each).update(names)


def _behaviour(sizes: dict[str, int]) -> Behaviour:
    found = resumed(sizes)
    numbers = {when: [found[f"rank {rank}, {when}, {EXPERT}"][0] for rank in range(2)] for when in ("on", "resumed")}
    on, after = ([f"{each:.4f}" for each in numbers[when]] for when in ("on", "resumed"))
    seen = f"two expert ranks draw {' and '.join(on)} after a checkpoint, and {' and '.join(after)} once they have loaded it"
    return Behaviour(broken=numbers["on"] != numbers["resumed"], seen=seen)


_case = functools.partial(Case, overlay="expert-rng-resume", device="cpu", versions=("torch",))
CASES = (
    _case(name="expert-ranks-cpu", run=functools.partial(_behaviour, EXPERTS)),
    _case(name="expert-tensor-ranks-cpu", run=functools.partial(_behaviour, EXPERT_TENSORS)),
)
