"""Names of layers in checkpoints of Megatron-FSDP: can a pipeline stage be wrapped, and whose layers would be loaded if it could?

No overlay. `refused-cpu` asks Megatron's adapter to wrap a stage on four ranks, in each way in which ranks can be divided, and the whole
model once, which it must take. `behind-cpu` answers for the meshes that refuse a stage, and saves and loads with torch's distributed
checkpoints on two ranks: from one stage to two, and from two to two and to one. Each layer holds its number in all its weights, so that what
a layer holds afterwards tells whose it is. The same is asked of `fully_shard_model`, which takes a stage with a mesh of the caller's own.

Ranks are forked and meet with gloo. Megatron-FSDP asks for a GPU in several places, and gets the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp_overlays.model import Target
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, fsdp_on_cpu

ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
WRAPPER = "FullyShardedDataParallel"
PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
MESHES = ("_get_dp_tp_mesh", "_get_hsdp_tp_mesh")
"""What makes a mesh of all ranks, and raises where that is not made of ranks that share data and tensors."""
LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE = 4, 8, 2, 16, 4
ELSEWHERE = 100.0
"""What weights hold that are in no layer."""
WHOLE = "no stages"
REFUSED: dict[str, dict[str, int]] = {
    WHOLE: {"stages": 1},
    "2 stages": {"stages": 2},
    "4 stages": {"stages": 4},
    "2 stages of 2 tensor ranks": {"stages": 2, "tensor": 2},
    "2 stages of 2 instances": {"stages": 2, "instances": 2},
    "2 stages of 2 experts": {"stages": 2, "experts": 2},
}
"""Four ranks in every case."""
HOW = ("adapter", "fully_shard_model")


# Which stages are refused


def _refused() -> Behaviour:
    found = _on_ranks(4, _wrap_all)[0]
    words = [f"{name}: {words}" for name, words in found.items()]
    return _judge_refusals(found, "; ".join(words))


def _judge_refusals(found: dict[str, str], seen: str) -> Behaviour:
    """Return whether the whole model was taken, and every stage refused by what makes meshes."""
    stages = [words for name, words in found.items() if name != WHOLE]
    holds = found[WHOLE] == "taken" and all(words.startswith(MESHES) for words in stages)
    return Behaviour(broken=not holds, seen=f"four ranks, wrapped by Megatron's adapter: {seen}")


def _wrap_all(_folder: Path) -> dict[str, str]:
    """Return of each way to divide ranks whether the adapter takes a part of the model, or in which function it raises what."""
    from megatron.core import parallel_state

    found = {}
    for name, sizes in REFUSED.items():
        try:
            _by_adapter(*_stage(**sizes), instances=sizes.get("instances", 1))
        except Exception as error:  # noqa: BLE001 - which one, and where, is what is asked
            functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            where = next((each for each in functions if each in MESHES), functions[-1])
            found[name] = f"{where} raises {type(error).__name__}"
        else:
            found[name] = "taken"
        parallel_state.destroy_model_parallel()
    return found


# What is behind that


def _behind() -> Behaviour:
    found = _on_ranks(2, _save_and_load)
    seen, holds = [], True
    for how in HOW:
        first, second = (each[how] for each in found)
        holds &= _holds(first, second)
        seen.append(
            f"{how}: saved by one stage and loaded by two, the second has weights of {_words(second['one to two'])} for 3 and 4; saved by two, "
            f"{first['saved']} of {first['of']} weights are there, and loaded by two the first has weights of {_words(first['two to two'])}, "
            f"the second of {_words(second['two to two'])}; loaded by one, {first['two to one']}"
        )
    return Behaviour(broken=not holds, seen=f"{LAYERS} layers on two ranks, {'; '.join(seen)}")


def _holds(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two stages use the same names, the second loads layers of the first, and a save by two keeps half of all weights."""
    mixed = (first["two to two"], second["two to two"]) != ([1, 2], [3, 4])
    return (
        first["names"] == second["names"] == [0, 1]
        and first["one to two"] == second["one to two"] == [1, 2]
        and 2 * first["saved"] == first["of"]
        and mixed
        and first["two to one"].startswith("Missing key")
    )


def _words(layers: list[int]) -> str:
    return " and ".join(map(str, layers))


def _save_and_load(folder: Path) -> dict[str, dict[str, Any]]:
    return {how: _with(how, folder / how) for how in HOW}


def _with(how: str, folder: Path) -> dict[str, Any]:
    """Return what this rank's stage is named, and whose weights it has after each load."""
    found: dict[str, Any] = {}
    one, two = (str(folder / name) for name in ("one", "two"))
    with _made(how, 1, full=True) as model:
        _save(model, one)
        found["of"] = len(_layers(model))
    with _made(how, 2, full=False) as model:
        found["one to two"] = _held(_loaded(how, model, one))
        found["names"] = sorted({_layer(name) for name in _layers(model)})
    with _made(how, 2, full=True) as model:
        _save(model, two)
    found["saved"] = sum(_layer(name) is not None for name in _written(two))
    with _made(how, 2, full=False) as model:
        found["two to two"] = _held(_loaded(how, model, two))
    with _made(how, 1, full=False) as model:
        try:
            _loaded(how, model, two)
        except importlib.import_module("torch.distributed.checkpoint").CheckpointException as error:  # what all ranks say
            said = re.findall(r"^RuntimeError: (Missing key.*)", str(error), re.MULTILINE)
            found["two to one"] = said[0] if said else repr(error)
        else:
            found["two to one"] = "loaded"
    return found


@contextlib.contextmanager
def _made(how: str, stages: int, *, full: bool) -> Any:
    """Yield a model of this rank's stage whose layers hold their numbers, or nothing."""
    import torch
    from megatron.core import parallel_state

    config, model, ranks = _stage(stages)
    for name, weight in model.named_parameters():
        layer = _layer(name)
        number = ELSEWHERE if layer is None else model.decoder.layers[layer].layer_number
        with torch.no_grad():
            weight.fill_(number if full else 0)
    yield _by_adapter(config, model, ranks, answered=True) if how == HOW[0] else _by_itself(config, model, ranks)
    parallel_state.destroy_model_parallel()


def _save(model: Any, folder: str) -> None:
    checkpoints = importlib.import_module("torch.distributed.checkpoint")
    checkpoints.save(_state(model), storage_writer=checkpoints.FileSystemWriter(folder))


def _loaded(how: str, model: Any, folder: str) -> Any:
    """Load all of a model, and let the model take it, both strictly."""
    checkpoints = importlib.import_module("torch.distributed.checkpoint")
    state = _state(model)
    planner = checkpoints.DefaultLoadPlanner(allow_partial_load=False)
    checkpoints.load(state, storage_reader=checkpoints.FileSystemReader(folder), planner=planner)
    weights = state["model"]
    if how == HOW[0]:  # it puts this part of a name there itself
        weights = {name.removeprefix("module."): weight for name, weight in weights.items()}
    model.load_state_dict(weights, strict=True)
    return model


def _state(model: Any) -> dict[str, dict[str, Any]]:
    """Return the state of a model as Megatron's training loop prepares that of one without experts and gated units."""
    uneven = importlib.import_module(f"{PACKAGE}.uneven_dtensor")
    state = {"model": dict(getattr(model, "state_dict_for_save_checkpoint", model.state_dict)())}
    uneven.preprocess_state_dict_for_uneven_dtensor(state)
    return state


def _written(folder: str) -> list[str]:
    """Return the names of weights in a checkpoint."""
    checkpoints = importlib.import_module("torch.distributed.checkpoint")
    found = checkpoints.FileSystemReader(folder).read_metadata().state_dict_metadata
    return [name for name, kept in found.items() if type(kept).__name__ == "TensorStorageMetadata"]


def _layers(model: Any) -> dict[str, Any]:
    """Return the weights of layers by name."""
    state = getattr(model, "state_dict_for_save_checkpoint", model.state_dict)()
    return {name: weight for name, weight in state.items() if _layer(name) is not None and hasattr(weight, "to_local")}


def _layer(name: str) -> int | None:
    found = re.search(r"\blayers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _held(model: Any) -> list[int]:
    """Return whose weights this rank has in its layers."""
    parts = [weight.to_local().flatten().tolist() for weight in _layers(model).values()]
    return sorted({int(value) for part in parts for value in part})


# Models


def _stage(stages: int, tensor: int = 1, instances: int = 1, experts: int = 1) -> tuple[Any, Any, list[int]]:
    """Return the configuration of a GPT, this rank's stage of it, and the ranks that have the same stage and tensors."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor, stages, num_distributed_optimizer_instances=instances, expert_model_parallel_size=experts
    )
    routed = {"num_moe_experts": experts, "add_bias_linear": False} if experts > 1 else {}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        expert_model_parallel_size=experts,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,  # sums over ranks: gloo has no means
        **routed,
    )
    model = gpt_model.GPTModel(
        config,
        gpt_layer_specs.get_gpt_layer_local_spec(num_experts=routed.get("num_moe_experts")),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return config, model, torch.distributed.get_process_group_ranks(group)


def _by_adapter(config: Any, model: Any, ranks: list[int], *, instances: int = 1, answered: bool = False) -> Any:
    """Return a stage as Megatron's adapter wraps it; `answered` gives it a mesh of the stage's own ranks, of shape [data, 1]."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig

    adapter = importlib.import_module(ADAPTER)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        num_distributed_optimizer_instances=instances,
    )
    own = getattr(adapter, MESHES[0])
    if answered:
        setattr(adapter, MESHES[0], lambda *_, **__: torch.tensor(ranks)[:, None])
    try:
        return getattr(adapter, WRAPPER)(config, settings, model, device=torch.device("cpu"))
    finally:
        setattr(adapter, MESHES[0], own)


def _by_itself(config: Any, model: Any, ranks: list[int]) -> Any:
    """Return a stage as `fully_shard_model` wraps it, with a mesh of this caller's: stages, data, one."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.distributed.device_mesh import init_device_mesh

    module = importlib.import_module(f"{PACKAGE}.fully_shard")
    sizes = (config.pipeline_model_parallel_size, len(ranks), 1)
    return module.fully_shard_model(
        module=model,
        device_mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("stages", "dp", "tp"))["dp", "tp"],
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[TransformerLayer],
        zero_dp_strategy="optim_grads_params",
        device=torch.device("cpu"),
        calculate_per_token_loss=True,
    )


# Ranks


def _on_ranks(ranks: int, find: Callable[[Path], Any]) -> list[Any]:
    """Return what each of so many ranks finds, which share a folder."""
    import torch  # noqa: F401 - once, before the forks

    if importlib.util.find_spec("einops") is None:
        raise Blocked("einops is not installed, and without it Megatron's adapter wraps nothing")
    try:
        importlib.import_module(ADAPTER)
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    except ModuleNotFoundError as error:
        raise TargetAbsent("there is no adapter for Megatron-FSDP") from error
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_rank, args=(find, rank, ranks, folder)) for rank in range(ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def _rank(find: Callable[[Path], Any], rank: int, ranks: int, folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    _answer_for_a_gpu()
    with contextlib.redirect_stdout(sys.stderr):
        found = find(Path(folder))
    Path(folder, str(rank)).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _answer_for_a_gpu() -> None:
    """Let Megatron-FSDP and its adapter take the CPU for the GPU of this process, which is a fork."""
    from torch.distributed import DeviceMesh

    class Mesh:
        """Makes meshes of the same groups, on the CPU."""

        @staticmethod
        def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
            return DeviceMesh.from_group(group, "cpu", *args, **kwargs)

    fsdp_on_cpu()
    vars(importlib.import_module(ADAPTER))["DeviceMesh"] = Mesh


ABOUT = (Target(distribution="megatron-core", module=ADAPTER, symbol=WRAPPER),)
CASES = (
    Case(
        name="refused-cpu",
        overlay=None,
        device="cpu",
        versions=("megatron-core", "torch", "einops"),
        run=_refused,
        claim="Megatron's adapter wraps no pipeline stage, so that no checkpoint has a stage's names for layers",
        about=ABOUT,
    ),
    Case(
        name="behind-cpu",
        overlay=None,
        device="cpu",
        versions=("megatron-core", "torch", "einops"),
        run=_behind,
        claim="were a stage wrapped, its layers would have the names of the first stage's, and a checkpoint the layers of one stage",
        about=ABOUT,
    ),
)
