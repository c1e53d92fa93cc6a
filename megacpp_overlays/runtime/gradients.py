"""Gradients without autograd's engine, for self-tests that run while targets are imported.

The first backward pass of a process lets the engine count the GPUs and start a thread for each. CUDA refuses a process that is forked
after that, and a launcher may fork its ranks after its imports. So self-tests walk the autograd graph themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def gradients(result: Any, *leaves: Any) -> list[Any]:
    """Return the gradient of a result with respect to tensors that it was computed from, None where it does not depend on one.

    Args:
        result: a tensor of one element, on the CPU.
        leaves: tensors that require a gradient. Theirs is returned, and `grad` stays as it is.
    """
    import torch

    found: dict[int, Any] = {}
    arrived: dict[Any, dict[int, Any]] = {result.grad_fn: {result.output_nr: torch.ones_like(result)}}
    with torch.no_grad():
        for node in _from_the_result_on(result.grad_fn):
            given = _as_it_was(node, arrived.pop(node, {}))
            if not given:
                continue
            if hasattr(node, "variable"):
                found[id(node.variable)] = given[0]
                continue
            outputs = [given.get(number) for number in range(len(node._input_metadata))]  # noqa: SLF001 - as below
            made = node(*outputs) if callable(node) else node.apply(*outputs)
            for value, (after, number) in zip(
                made if isinstance(made, tuple) else (made,), node.next_functions, strict=False
            ):
                if after is not None and value is not None:
                    sums = arrived.setdefault(after, {})
                    sums[number] = sums[number] + value if number in sums else value
    return [found.get(id(leaf)) for leaf in leaves]


def _as_it_was(node: Any, given: dict[int, Any]) -> dict[int, Any]:
    """Return the gradients of a node's results in the shapes of the results; a broadcast gradient is summed."""
    if hasattr(node, "variable"):
        return {number: each.sum_to_size(node.variable.shape) for number, each in given.items()}
    shapes = [tuple(each.shape) for each in node._input_metadata]  # noqa: SLF001 - the engine itself uses it
    return {number: each.sum_to_size(shapes[number]) for number, each in given.items()}


def _from_the_result_on(first: Any) -> Iterator[Any]:
    """Yield each node after all through which the result depends on it."""
    waits: dict[Any, int] = {first: 0}
    todo = [first]
    while todo:
        for after, _ in todo.pop().next_functions:
            if after is not None:
                if after not in waits:
                    waits[after] = 0
                    todo.append(after)
                waits[after] += 1
    ready = [first]
    while ready:
        node = ready.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None:
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
