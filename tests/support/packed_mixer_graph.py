"""Run in a fresh interpreter on a GPU: a CUDA graph of a real MambaMixer over packed rows, replayed with other documents; JSON.

TRITON_F32_DEFAULT=ieee MAMBA_DETERMINISTIC=1 python tests/support/packed_mixer_graph.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

import megacpp_overlays  # noqa: F401 - first, as in a launcher

# isort: split
import torch
from packed_mixer import CHUNK, Packing, Pass, alone, apart, make, prepare, run, weights_of

CAPTURED = Packing((11, CHUNK, 5))
REPLAYED = {"other documents": Packing((3, 9, 20)), "captured again": CAPTURED, "shorter": Packing((1, 1, 30))}


def main() -> None:
    """Answer on standard output."""
    module = prepare()
    mixer = make(module)
    params = CAPTURED.params(module)
    row, weights = CAPTURED.row().requires_grad_(), weights_of(CAPTURED)

    def step() -> torch.Tensor:
        output, _ = mixer(row, packed_seq_params=params)
        (output * weights).sum().backward()
        return output

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):  # the kept numbers of this pass must not be those of a replay
        for _ in range(3):
            row.grad = None
            mixer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(warm)
    row.grad = None
    mixer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    report: dict[str, Any] = {"replays": {}}
    for name, packing in REPLAYED.items():
        assert packing.tokens == CAPTURED.tokens
        with torch.no_grad():
            params.cu_seqlens_q.copy_(packing.params(module).cu_seqlens_q)
            row.copy_(packing.row())
            weights.copy_(weights_of(packing))
        for each in (row, *mixer.parameters()):
            if each.grad is not None:
                each.grad.zero_()  # a graph adds to the gradients that it was captured with
        graph.replay()
        torch.cuda.synchronize()
        slopes = {key: each.grad.clone() for key, each in mixer.named_parameters() if each.grad is not None}
        found = Pass(output.detach()[:, 0].clone(), row.grad[:, 0].clone(), slopes)  # type: ignore[index]
        twin = make(module)
        report["replays"][name] = apart(found, alone(twin, packing), packing)
    report["waits"] = _waits(module, make(module))
    sys.stdout.write(json.dumps(report))


def _waits(module: Any, mixer: Any) -> str | None:
    """Return PyTorch's error for a forward pass in which the host waits for the device, None where it never does."""
    packing = Packing((7, 20))
    row, weights = packing.row(), weights_of(packing)
    run(mixer, row, weights, packing.params(module))
    params = packing.params(module)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixer(row, packed_seq_params=params)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


if __name__ == "__main__":
    main()
