"""Extract the score gradient of a backward by running it on proxy tensors.

Upstream's backward of the fused indexer loss works out the gradient of the index scores, (batch, queries, keys), and
then, in the same function, takes the gradients of the indexer's inputs from it. Only the second half builds four-axis
tensors. Given a `ProxyTensor` in place of each input, upstream's own code does the first half. The second half becomes a few
calls without cost, and the tensor that they multiply with proxies is the gradient.

Proxies support only the calls in the upstream bodies that were read. Any other operation raises, because a wrong tensor taken for
the gradient would go unnoticed.

Standard library only: torch calls `__torch_function__` of any argument.
"""

from __future__ import annotations

from typing import Any

_PRODUCTS = 2
"""The gradient is multiplied with the products of queries and keys, and with the weights."""


class BackwardTrace:
    """Record of one backward run on proxies: the tensors that they replace, and the factors they were multiplied with.

    It does not hold the proxies, which hold it: a cycle would keep the tensors alive.
    """

    def __init__(self, q: Any, weights: Any, k: Any, advice: str) -> None:
        """Trace a backward of tensors (queries, batch, heads, dim), (queries, batch, heads) and (keys, batch, dim).

        Args:
            q: the queries, as the backward would get them.
            weights: the weights of the heads, likewise.
            k: the keys, likewise.
            advice: text at the end of every error.
        """
        self.tensors, self.advice = (q, weights, k), advice
        self.factors: list[Any] = []
        self.rectified = False
        """Whether products of queries and keys went through a relu."""

    def proxies(self) -> list[ProxyTensor]:
        """Return the arguments of the backward in place of q, weights and k."""
        return [ProxyTensor(self, place) for place in range(len(self.tensors))]

    def gradient(self, returned: Any) -> Any:
        """Return the gradient of the index scores, (batch, queries, keys), as a view of the recorded factor.

        Args:
            returned: the result of the backward for the proxies.

        Raises:
            RuntimeError: the backward did something else than the known ones do.
        """
        q, _, k = self.tensors
        if not isinstance(returned, tuple) or [type(each) for each in returned] != [ProxyTensor] * len(self.tensors):
            raise self.refusal("it did not return three gradients of its inputs")
        if len(self.factors) != _PRODUCTS or any(each is not self.factors[0] for each in self.factors):
            raise self.refusal("it did not multiply one gradient with products and weights")
        if self.factors[0].shape != (expected := (q.size(0), q.size(1), 1, k.size(0))):
            raise self.refusal(f"its gradient is {tuple(self.factors[0].shape)} and not {expected}")
        return self.factors[0].squeeze(2).transpose(0, 1)

    def refusal(self, reason: str) -> RuntimeError:
        """Return the error about an unknown backward, with the reason and the advice."""
        return RuntimeError(f"{reason}: {self.advice}")


class ProxyTensor:
    """Proxy for an input tensor of a backward. No value is computed: each supported operation returns the proxy."""

    def __init__(self, trace: BackwardTrace, place: int) -> None:
        """Replace the tensor at a place of the arguments."""
        self.trace, self.place = trace, place
        self.device, self.dtype = trace.tensors[place].device, trace.tensors[place].dtype

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), _kwargs: Any = None
    ) -> ProxyTensor:
        """Return the first proxy among the arguments; record the tensor that it is multiplied with."""
        proxy: ProxyTensor = next(each for each in args if isinstance(each, ProxyTensor))
        trace, name = proxy.trace, getattr(function, "__name__", "?")
        if name == "mul" and args[1] is proxy:
            trace.factors.append(args[0])
        elif name == "relu":
            trace.rectified = True
        elif name != "einsum":
            raise trace.refusal(f"it calls {name} with its inputs")
        return proxy

    def _same(self, *_: Any, **__: Any) -> ProxyTensor:
        return self

    float = unsqueeze = sum = to = __gt__ = _same

    def __mul__(self, other: Any) -> ProxyTensor:
        """Return the proxy: the gradient of a relu is multiplied with the relu's mask, which is a proxy too."""
        return self if isinstance(other, ProxyTensor) else NotImplemented

    def __getattr__(self, name: str) -> Any:
        """Refuse any other attribute.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"it asks its inputs for {name}: {vars(self)['trace'].advice}")


def true_tensors(q: Any, weights: Any, k: Any) -> tuple[Any, Any, Any]:
    """Return the tensors behind the arguments of the score function; tensors are returned unchanged.

    Raises:
        RuntimeError: they are proxies in another order, or only some of them are.
    """
    given = (q, weights, k)
    if not isinstance(q, ProxyTensor):
        return given
    if [each.place for each in given if isinstance(each, ProxyTensor)] != [0, 1, 2]:
        raise q.trace.refusal("it swaps its inputs")
    return q.trace.tensors
