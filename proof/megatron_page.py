"""The sections of a proof's page about Megatron-LM's own launcher and tests."""

from __future__ import annotations

from claims import Found
from kept_tests import outcomes
from megatron_checkout import LAUNCHER
from megatron_launches import BOTH, CONTEXT, Launch, Layout, Way
from megatron_micro_batch import STEPS
from megatron_neighbours import BUCKETS, PADDING
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
        f"{found['steps']} steps, bfloat16. {WHERE[found['host']]}",
        "",
        f"![Losses of each step; on a GPU also a step's time, memory and the largest micro-batch](megatron-{found['host']}.svg)",
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


def contexts(found: Found) -> list[str]:
    """Return the lines about context-parallel ranks; none where there is one device."""
    if not found["runs"]:
        return []
    return [
        "## Over context-parallel ranks",
        "",
        f"The same launcher and model with `{' '.join(CONTEXT)}`, {found['steps']} steps.",
        *losses(found, Layout.CONTEXT),
    ]


def resumes(found: Found) -> list[str]:
    """Return the lines about checkpoints."""
    step = found["saved"] + 1
    rows = []
    for name, run in found["runs"].items():
        ended = run.get("error") or f"{run['losses'][run['iterations'].index(step)]:.6f}"
        rows.append([name, ended])
    return [
        "## Its checkpoints",
        "",
        f"Runs of {found['steps']} steps that save after step {found['saved']}, and runs that go on from there.",
        "",
        *table(["run", f"loss of step {step}"], rows),
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
        [
            str(place + 1),
            *(f"{run[series][place]:.6g}" for series in ("losses", "norms") for run in runs.values() if run),
        ]
        for place in places
    ]
    return ["", f"{layout.value.capitalize()}:", "", *table(["step", *heads], rows)]


def decisions(found: Found) -> list[str]:
    """Return a line for each decision of the run on one rank."""
    return by_decision(found["runs"][Launch(Way.OVERLAYS).name])


def by_decision(run: Found) -> list[str]:
    """Return a line for each decision, with the overlays of which it was made."""
    names: dict[str, list[str]] = {}
    for name, decision in sorted(run["decisions"].items()):
        calls = f" ({run['calls'][name]} calls)" if name in run["calls"] else ""
        names.setdefault(decision, []).append(name + calls)
    return [f"- {decision}: {', '.join(each)}" for decision, each in sorted(names.items())]


def micro_batches(found: Found) -> list[str]:
    """Return the lines of the section about micro-batches; none where there was nothing to look for."""
    if not found["largest"]:
        return []
    rows = [
        [way, size, "out of memory" if "error" in run else f"{run['peak_mib'] / 1024:.1f} GiB"]
        for way, tries in found["tried"].items()
        for size, run in sorted(tries.items(), key=lambda each: int(each[0]))
    ]
    return [
        "## The largest micro-batch",
        "",
        f"The same launcher and model, {STEPS} steps of one micro-batch each. A size that fits is doubled, up to {found['most']}; overlays begin",
        "where stock ended. An end for any other reason than memory is an error.",
        "",
        *table(["way", "samples", "most memory"], rows),
    ]


def graphs(found: Found) -> list[str]:
    """Return the lines of the section about CUDA graphs; none where there was nothing to capture."""
    if not found["runs"]:
        return []
    rows = []
    for name, run in found["runs"].items():
        if "error" in run:
            rows.append([name, "-", "-", f"ended after {run['steps']} steps"])
        else:
            rows.append([name, str(run["graphs"]), f"{run['losses'][-1]:.6g}", f"{len(run['losses'])} steps"])
    return [
        "## Under CUDA graphs",
        "",
        f"The same launcher and model with `{' '.join(found['words'])}`: the first step is recorded, later ones are replayed.",
        "",
        *table(["launch", "graphs", "last loss", "end"], rows),
    ]


def neighbours(found: Found) -> list[str]:
    """Return the lines of the section about checkpoints that are written broken; none where they were not asked."""
    wrong = found.get(BUCKETS.id, {}).get("off", {}).get("wrong")
    if not wrong:
        return []
    return [
        f"## A checkpoint without `{PADDING}`",
        "",
        f"`{' '.join(BUCKETS.words)}`, and the output of `megacpp-overlays checkpoint` about the saved checkpoint:",
        "",
        *(f"- {name}: {says}" for name, says in sorted(wrong.items())),
    ]


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
