"""What Megatron's launchers ask of CUDA, answered by the CPU; Python imports this by itself where its folder is on the path.

Megatron-LM's training loop wants a GPU from its first line: streams, events, random states, memory figures, `.cuda()`. Here
each of these is a small thing that does nothing or works on CPU tensors, so that the launcher runs as it is. Kernels are
not in it: what computes is PyTorch, and what this project puts in place.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import wrapt


class Event:
    """An event of a device that has done everything when it is asked."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, *_: Any) -> None:
        """Keep the time."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds."""
        return (end.seconds - self.seconds) * 1e3

    def query(self) -> bool:
        """Say that it is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    wait = synchronize


class Stream(contextlib.nullcontext[None]):
    """The one queue of a device that does everything at once."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event behind everything that was asked for, which is done."""
        return event or Event()

    def synchronize(self, *_: Any) -> None:
        """Wait for nothing."""

    wait_stream = wait_event = synchronize


class Device(contextlib.nullcontext[None]):
    """A choice of a device, where there is one."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


class Generators:
    """The generators of all devices: the CPU's."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __getitem__(self, _device: Any) -> Any:
        return self.generator


MADE_ON_A_DEVICE = ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange")
MADE_ON_A_DEVICE += ("empty_like", "zeros_like", "ones_like")
DOES_NOTHING = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed_all", "_lazy_init")
RANKS = 8
"""Devices that there are said to be: launchers want one for each rank of a host."""


@wrapt.when_imported("torch")
def answer(torch: ModuleType) -> None:
    """Put the answers into torch."""
    cpu = torch.device("cpu")
    here = Stream()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: RANKS,
        "current_device": lambda: cpu,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": Generators(torch.default_generator),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="cpu", major=9, minor=0, multi_processor_count=1, total_memory=1 << 34
        ),
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda device=None: {},
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: here,
        "default_stream": lambda device=None: here,
        "Event": Event,
        "Stream": Stream,
        "device": Device,
        "_lazy_call": lambda call, **_: call(),
    }
    for name in DOES_NOTHING:
        answers[name] = lambda *_, **__: None  # each its own: Dynamo keeps a table of them
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        answers[name] = lambda device=None: 0
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ByteTensor"):
        answers[name] = getattr(torch, name)
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = answers["get_rng_state"]
    torch.cuda.random.set_rng_state = answers["set_rng_state"]
    for name in MADE_ON_A_DEVICE:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.to = on_cpu(torch.Tensor.to)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    torch.nn.Module.cuda = lambda module, *_, **__: module
    torch.Tensor.type = named_as_on_a_device(torch.Tensor.type)
    torch.distributed.init_process_group = over_gloo(torch.distributed.init_process_group)


def over_gloo(make: Callable[..., None]) -> Callable[..., None]:
    """Return a function that makes process groups of gloo where NCCL, or nothing, is asked for."""

    @functools.wraps(make)
    def init_process_group(backend: str | None = None, *given: Any, **named: Any) -> None:
        make("gloo" if backend in {None, "nccl"} else backend, *given, **named)

    return init_process_group


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the CPU where it is given a CUDA device."""

    def called(*given: Any, **named: Any) -> Any:
        return function(*map(_taken, given), **{name: _taken(each) for name, each in named.items()})

    return called


def _taken(given: Any) -> Any:
    is_device = isinstance(given, str) or type(given).__name__ == "device"
    return "cpu" if is_device and str(given).startswith("cuda") else given


def named_as_on_a_device(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.type`, which says of a CPU tensor what it would say of one on a GPU: Megatron asserts that of gradients."""

    def called(tensor: Any, *given: Any, **named: Any) -> Any:
        return kind(tensor, *given, **named) if given or named else kind(tensor).replace("torch.", "torch.cuda.")

    return called
