"""The sections of a proof's page about Megatron-LM's own launcher and tests."""

from __future__ import annotations

from claims import Found
from kept_tests import outcomes
from megatron_checkout import LAUNCHER
from megatron_launches import BOTH, Launch, Layout, Way
from report import table

WHERE = {
    "cpu": "On a CPU: `proof/on_cpu` answers for CUDA, and nothing in it computes; kernels of overlays are PyTorch in blocks.",
    "gpu": "On a GPU, with the kernels of overlays as a run has them.",
}


def launches(found: Found) -> list[str]:
    """Return the lines of the section."""
    checkout = found["checkout"]
    return [
        f"## Megatron-LM's {LAUNCHER}",
        "",
        f"Version {checkout['version']}, commit {checkout['commit']},",
        f"SHA-256 of the launcher `{checkout[LAUNCHER]}`. It is launched as it is by `torchrun`, and by",
        f"`megacpp-overlays run --verify-ranks` in front of that. Layers `{found['pattern']}`: D is DeepSeek sparse attention over absorbed",
        "latent attention, M Mamba-2, - an MLP, E experts, in Megatron's local modules (`proof/launchers/local_stack.py`).",
        f"{found['steps']} steps, bfloat16, a checkpoint after step {found['saved']}. {WHERE[found['host']]}",
        *(line for layout in Layout for line in losses(found, layout)),
        "",
        "Decisions where overlays are on:",
        "",
        *decisions(found),
        "",
        "Its arguments:",
        "",
        "```",
        " ".join(found["arguments"]),
        "```",
    ]


def losses(found: Found, layout: Layout) -> list[str]:
    """Return the lines about the losses of a layout; none where it was not launched."""
    runs = {way: found["runs"].get(Launch(way, layout).name) for way in BOTH}
    if any(each is None for each in runs.values()):
        return []
    last = found["steps"] - 1
    places = sorted({round(last * part / 6) for part in range(7)})
    heads = [f"{name}, {way.value}" for name in ("loss", "grad norm") for way in runs]
    rows = [
        [str(place + 1), *(f"{run[what][place]:.6g}" for what in ("losses", "norms") for run in runs.values() if run)]
        for place in places
    ]
    return ["", f"{layout.value.capitalize()}:", "", *table(["step", *heads], rows)]


def decisions(found: Found) -> list[str]:
    """Return a line for each decision, with the overlays of which it was made."""
    run = found["runs"][Launch(Way.OVERLAYS).name]
    by_decision: dict[str, list[str]] = {}
    for name, decision in sorted(run["decisions"].items()):
        calls = f" ({run['calls'][name]} calls)" if name in run["calls"] else ""
        by_decision.setdefault(decision, []).append(name + calls)
    return [f"- {decision}: {', '.join(names)}" for decision, names in sorted(by_decision.items())]


def tests(found: Found) -> list[str]:
    """Return the lines of the section about its tests."""
    return [
        "## Megatron-LM's own tests of sparse attention",
        "",
        f"`{found['folder']}` of the same checkout, as it is; without Transformer Engine, TileLang and a second rank many of them end",
        "before they begin, with overlays and without.",
        "",
        *outcomes(found),
    ]
