"""The indexer over chosen keys: plain PyTorch, kernels in Triton's interpreter, the operators, and which way is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kept_answers
import pytest
import torch
from chosen_keys_cases import Sizes, error, inputs, true_gradients
from index_scores_cases import DEVICES

from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.chosen_keys import function as chosen_keys
from megacpp_overlays.kernels.chosen_keys import in_torch, query_blocks, reference
from megacpp_overlays.kernels.top_k import function as top_k

CUDA = torch.device("cuda", 0)
SMALL = Sizes(7, 9, 2, 3, 8, 4, 3, 16, 4)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Keep tiny operators from waiting for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The truth.


def test_the_reference_is_the_formula() -> None:
    made = inputs(SMALL, dtype=torch.float64)
    weights = made.weights.double()
    indices, scores = reference.choose(made.q, weights, made.k, 4, made.starts, made.ends)
    sums = reference.target(made.query, made.key, indices, 0.3)
    divergences, differences = reference.compare(scores, sums, indices, 1e-10)

    for element in range(2):
        for query in range(7):
            seen = range(int(made.starts[query]), int(made.ends[query]))
            score = {
                at: float(((made.q[query, element] @ made.k[at, element]).relu() * weights[query, element]).sum())
                for at in seen
            }
            best = sorted(sorted(seen, key=lambda at: -score[at])[:4])
            assert indices[element, query].tolist() == best + [-1] * (4 - len(best))
            if not best:
                assert not sums[element, query].any()
                assert not differences[element, query].any()
                continue
            of_heads = torch.softmax(made.query[query, element] @ made.key[best, element, 0].T * 0.3, dim=-1).sum(dim=0)
            wanted = of_heads / of_heads.sum()
            predicted = torch.softmax(torch.tensor([score[at] for at in best], dtype=torch.float64), dim=-1)
            assert torch.allclose(sums[element, query, : len(best)], of_heads)
            assert torch.allclose(differences[element, query, : len(best)], predicted - wanted)
            assert torch.allclose(divergences[element, query], (wanted * (wanted / predicted).log()).sum())


def test_gradients_are_those_of_autograd() -> None:
    made = inputs(SMALL, dtype=torch.float64)
    leaves = [each.requires_grad_() for each in (made.q, made.weights.double(), made.k)]
    indices, _ = reference.choose(*(each.detach() for each in leaves), 4, made.starts, made.ends)
    products = torch.einsum("sbhd,tbd->bhst", leaves[0], leaves[2]).relu()
    whole = torch.einsum("bhst,sbh->bst", products, leaves[1])
    there = indices >= 0

    expected = torch.autograd.grad(whole.gather(-1, indices.clamp(min=0))[there], leaves, made.grad.double()[there])

    for one, other in zip(true_gradients(made, indices, True), expected, strict=True):
        assert torch.allclose(one, other)


# Plain PyTorch, in blocks.


@pytest.mark.parametrize("block", [1, 40, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use_relu", [True, False])
def test_blocks_in_pytorch_are_as_near_as_float32(
    block: int, dtype: torch.dtype, use_relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_torch, "_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(query_blocks, "_BLOCK_BYTES", 4 * block)
    made = inputs(SMALL, dtype=dtype)
    indices, scores = chosen_keys.choose(made.q, made.weights, made.k, 4, made.starts, made.ends, use_relu)
    wide = (each.double() for each in (made.q, made.weights, made.k))
    true_indices, true_scores = reference.choose(*wide, 4, made.starts, made.ends, use_relu)
    there = indices >= 0

    assert torch.equal(indices, true_indices)
    assert error(scores[there], true_scores[there]) <= 1e-6
    sums = chosen_keys.target(made.query, made.key, indices, 0.3)
    assert error(sums, reference.target(made.query.double(), made.key.double(), indices, 0.3)) <= 1e-6
    gradients = chosen_keys.gradients(made.grad, indices, made.q, made.weights, made.k, use_relu)
    for mine, true in zip(gradients, true_gradients(made, indices, use_relu), strict=True):
        assert error(mine, true) <= 1e-6 + 1.1 * error(true.to(mine.dtype), true)
    divergences, differences = reference.compare(scores.double(), sums.double(), indices, 1e-10)
    assert error(chosen_keys.compare(scores, sums, indices, 1e-10), divergences) <= 1e-5
    assert error(scores, differences) <= 1e-6


@pytest.mark.parametrize("nothing", ["queries", "chosen"])
def test_nothing_may_be_asked_for(nothing: str) -> None:
    made = inputs(SMALL)
    rows = slice(0, 0 if nothing == "queries" else None)
    given = (made.q[rows], made.weights[rows], made.k)
    indices, scores = chosen_keys.choose(*given, 0, made.starts[rows], made.ends[rows])

    assert indices.shape == scores.shape == (2, given[0].size(0), 0)
    assert chosen_keys.target(made.query[rows], made.key, indices, 1.0).shape == indices.shape
    assert not chosen_keys.compare(scores, scores, indices, 1e-10).any()
    found = chosen_keys.gradients(scores, indices, *given)
    assert [each.shape for each in found] == [each.shape for each in given]
    assert not any(each.any() for each in found)


# The operators.


def test_pytorch_s_own_checks_of_operators_pass() -> None:
    made = inputs(SMALL)
    chosen = (made.q, made.weights, made.k, 4, made.starts, made.ends, True)
    indices, scores = chosen_keys._choose(*chosen)

    torch.library.opcheck(chosen_keys._choose, chosen)
    torch.library.opcheck(chosen_keys._target, (made.query, made.key, indices, 0.3))
    torch.library.opcheck(chosen_keys._compare, (scores, made.grad.abs(), indices, 1e-10))
    torch.library.opcheck(chosen_keys._gradients, (made.grad, indices, made.q, made.weights, made.k, True))


def test_a_compiled_step_is_one_graph_and_gives_the_same_bits() -> None:
    made = inputs(SMALL)

    def step() -> Any:
        indices, scores = chosen_keys.choose(made.q, made.weights, made.k, 4, made.starts, made.ends)
        sums = chosen_keys.target(made.query, made.key, indices, 0.3)
        return chosen_keys.compare(scores, sums, indices, 1e-10), scores

    compiled = torch.compile(step, backend="eager", fullgraph=True)

    assert all(torch.equal(one, other) for one, other in zip(compiled(), step(), strict=True))


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "a key of another batch": lambda made, at: chosen_keys.target(made.query, made.key[:, :1], at, 1.0),
    "keys of each head": lambda made, at: chosen_keys.target(made.query, made.key.expand(-1, -1, 3, -1), at, 1.0),
    "indices of other rows": lambda made, at: chosen_keys.target(made.query, made.key, at[:, 1:], 1.0),
    "more than there are": lambda made, at: chosen_keys.choose(
        made.q, made.weights, made.k, 10, made.starts, made.ends
    ),
    "bounds of other rows": lambda made, at: chosen_keys.choose(
        made.q, made.weights, made.k, 4, made.starts[1:], made.ends
    ),
    "weights of other heads": lambda made, at: chosen_keys.choose(
        made.q, made.weights[:, :, 1:], made.k, 4, made.starts, made.ends
    ),
    "a gradient of other slots": lambda made, at: chosen_keys.gradients(
        made.grad[..., 1:], at, made.q, made.weights, made.k
    ),
    "scores of other slots": lambda made, at: chosen_keys.compare(made.grad[..., 1:], made.grad, at, 1e-10),
    "scores that are a view": lambda made, at: chosen_keys.compare(made.grad.mT.contiguous().mT, made.grad, at, 1e-10),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_inconsistent_arguments_are_refused(wrong: str) -> None:
    made = inputs(SMALL)
    indices, _ = chosen_keys.choose(made.q, made.weights, made.k, 4, made.starts, made.ends)

    with pytest.raises(ValueError, match="must be"):
        WRONG[wrong](made, indices)


# Which way is taken.


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a class of fake tensors on a host that pretends to have a device."""
    pytest.importorskip("triton")
    chosen_keys._kernels.cache_clear()
    monkeypatch.setattr(measured, "_said", set())
    monkeypatch.setattr(measured, "_triton", lambda: "3.6.0")
    monkeypatch.setattr(torch.version, "hip", None)

    class TensorDescription:
        def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, found: str = "H200") -> None:
            capability = DEVICES[found].major, DEVICES[found].minor
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
            chosen_keys._kernels.cache_clear()
            self.shape, self.dtype, self.device = shape, dtype, CUDA

        def size(self, axis: int) -> int:
            return self.shape[axis]

    yield TensorDescription
    chosen_keys._kernels.cache_clear()


def test_kernels_are_for_hopper_and_for_sizes_that_they_hold(hopper: Callable[..., Any]) -> None:
    q, k = hopper(8, 1, 64, 128), hopper(8, 1, 128)
    assert chosen_keys.gradient_way(q, k).__name__.endswith("in_triton")
    assert chosen_keys.target_way(hopper(8, 1, 128, 576), k).__name__.endswith("in_triton")
    assert chosen_keys.gradient_way(hopper(8, 1, 65, 128), k) is in_torch
    assert chosen_keys.gradient_way(hopper(8, 1, 64, 129), k) is in_torch
    assert chosen_keys.gradient_way(hopper(8, 1, 64, 128, dtype=torch.float16), k) is in_torch
    assert chosen_keys.target_way(hopper(8, 1, 16, 641), k) is in_torch
    assert chosen_keys.target_way(hopper(8, 1, 16, 576, dtype=torch.float32), k) is in_torch
    assert chosen_keys.gradient_way(hopper(8, 1, 64, 128, found="A100"), k) is in_torch


def test_all_four_have_kernels_or_none_counts(hopper: Callable[..., Any]) -> None:
    top_k._of_device.cache_clear()
    q, k, query = hopper(8, 1, 64, 128), hopper(40000, 1, 128), hopper(8, 1, 16, 576)

    assert chosen_keys.has_kernels(q, k, query, query, 2048)
    assert not chosen_keys.has_kernels(q, k, query, query, 16385)
    assert not chosen_keys.has_kernels(hopper(8, 1, 65, 128), k, query, query, 2048)
    assert not chosen_keys.has_kernels(q, k, hopper(8, 1, 16, 641), query, 2048)
    top_k._of_device.cache_clear()


# Kernels, in an interpreter of their own.


@pytest.fixture(scope="module")
def facts(grid_size: str) -> dict[str, Any]:
    """Return the results of `chosen_keys_facts.py`."""
    pytest.importorskip("triton")
    return kept_answers.answer("chosen_keys_facts.py", grid_size, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def test_the_interpreter_takes_the_kernels(facts: dict[str, Any]) -> None:
    assert {way for found in facts.values() for way in found["ways"]} == {"in_triton"}


def test_kernels_agree_with_float64_in_choice_and_comparison(facts: dict[str, Any]) -> None:
    for name, found in facts.items():
        assert found["indices"], name
        assert found["sees nothing"], name
        assert found["no target"], name
        assert found["scores"] <= 1e-6, name
        assert found["target"] <= 3e-7, name
        assert found["divergences"] <= 1e-5, name
        assert found["differences"] <= 1e-6, name
        assert found["NaN"], name


def test_gradients_of_kernels_have_the_errors_of_one_rounding(facts: dict[str, Any]) -> None:
    # The interpreter cuts float32 numbers to bfloat16 where a device rounds them.
    assert {name: found["shares"] for name, found in facts.items() if max(found["shares"]) > 2.5} == {}
