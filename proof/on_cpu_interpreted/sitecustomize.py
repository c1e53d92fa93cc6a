"""The answers of `proof/on_cpu`, and Triton's kernels in Triton's own interpreter; Python imports this by itself.

Mamba-2's scan and fla's norm are Triton kernels and nothing else. With TRITON_INTERPRET=1 they run on CPU tensors as they are.
A kernel with several configurations is timed on a GPU first, which there is none of: here each takes its largest one, whose
blocks are interpreted in the fewest turns. The interpreter keeps bfloat16 as integers of 16 bits, and multiplies matrices of them
as integers: here they are what they stand for.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

runpy.run_path(str(Path(__file__).resolve().parents[1] / "on_cpu" / "sitecustomize.py"), run_name="on_cpu")


@wrapt.when_imported("triton.runtime.autotuner")
def take_the_largest(autotuner: ModuleType) -> None:
    """Let what is tuned have one configuration."""
    wrapt.wrap_function_wrapper(autotuner, "Autotuner.__init__", _with_one)


def _with_one(make: Callable[..., None], tuner: Any, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    make(*given, **named)
    tuner.configs = [max(tuner.configs, key=_elements)]


@wrapt.when_imported("triton.runtime.interpreter")
def multiply_what_bits_stand_for(interpreter: ModuleType) -> None:
    """Let products of bfloat16 be exact and summed in float32, as on a GPU."""
    import numpy

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        bits = handle.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), interpreter.tl.float32)

    def create_dot(make: Callable[..., Any], _builder: Any, given: Sequence[Any], _named: Mapping[str, Any]) -> Any:
        left, right, *others = given
        return make(widened(left), widened(right), *others)

    wrapt.wrap_function_wrapper(interpreter, "InterpreterBuilder.create_dot", create_dot)


def _elements(configuration: Any) -> int:
    """Return how many elements a block of this configuration has."""
    return prod(value for value in configuration.kwargs.values() if type(value) is int)
