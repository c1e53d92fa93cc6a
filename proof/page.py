"""Write the Markdown page of a proof from its receipts. Standard library only."""

from __future__ import annotations

import bridge_page
import megatron_layers_page
import megatron_page
import megatron_unit_page
from claims import Found
from kept_tests import outcomes, repaired
from report import source, table
from trainer_launches import Data, Launch, Way

MEANING = {
    "HOLDS": "it is so",
    "FAILS": "it is not so",
    "UPSTREAM": "something fails, and fails in the same way without overlays",
}
TITLES = {
    False: ("Proof on a CPU", "make proof-cpu"),
    True: ("Proof with Megatron-LM's own launcher", "make proof MEGATRON_LM=CHECKOUT"),
}
"""Title and command of the proofs without and with a checkout of Megatron-LM."""
ON_A_GPU = ("Proof on a GPU", "make proof-gpu")
LAYERS_TITLE = (
    "Proof with every type of layer in Megatron-LM's own launcher",
    "proof/run.py --megatron-lm CHECKOUT --only megatron-layers",
)
"""Of a run of this part alone: its packages are in no lock."""
BRIDGE_TITLE = ("Proof with the pretrain function of megatron-bridge", "make proof-bridge")


def markdown(found: Found) -> str:
    """Return the page of a proof."""
    claims, measured = found["claims"], found["measured"]
    counts = ", ".join(f"{sum(each['outcome'] == word for each in claims)} {word}" for word in MEANING)
    has_checkout = any(name.startswith("megatron") for name in measured)
    title, command = TITLES[has_checkout]
    if "bridge" in measured:
        title, command = BRIDGE_TITLE
    elif set(measured) == {"megatron-layers"}:
        title, command = LAYERS_TITLE
    elif not has_checkout and "gpu" in found["host"]:
        title, command = ON_A_GPU
    lines = [
        f"# {title}",
        "",
        f"Written by `{command}`, which does all of this again. {counts}.",
        "",
        *source(found),
        f"- Its processes computed for {found['cpu_seconds']:.0f} s of that",
        *(f"- SHA-256 of `{name}`: `{digest}`" for name, digest in found["inputs"].items()),
        *(["- Quick: fewer steps and fewer of upstream's tests"] if found["quick"] else []),
        "",
        *table(
            ["claim", "outcome", "figure"],
            [[_cell(each[key]) for key in ("says", "outcome", "figure")] for each in claims],
        ),
        "",
        " ".join(f"{word}: {meaning}." for word, meaning in MEANING.items()),
    ]
    sections = {
        "trainer": _trainer,
        "liger-tests": _liger_tests,
        "megatron": megatron_page.launches,
        "megatron-context": megatron_page.contexts,
        "megatron-resumes": megatron_page.resumes,
        "megatron-micro-batch": megatron_page.micro_batches,
        "megatron-graphs": megatron_page.graphs,
        "megatron-neighbours": megatron_page.neighbours,
        "megatron-layers": megatron_layers_page.layers,
        "megatron-tests": megatron_page.tests,
        "megatron-unit-tests": megatron_unit_page.section,
        "bridge": bridge_page.launches,
    }
    for name, section in sections.items():
        if name in measured and (body := section(measured[name])):
            lines += ["", *body]
    if found["problems"]:
        lines += ["", "## Problems", "", *(f"```\n{text}\n```" for text in found["problems"])]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _trainer(found: Found) -> list[str]:
    return [
        "## The Trainer of transformers",
        "",
        *(["![Loss and grad_norm against steps](cpu.svg)", ""] if found["host"] == "cpu" else []),
        "`proof/launchers/hf_trainer.py` is a script as a user could have written it: a Llama from `LlamaConfig`, the Trainer's own",
        "loop, and the weighted mean of a loss for each token, which comes from Liger's fused linear cross entropy with",
        "`reduction=\"none\"`. It is launched as it is (stock), with PyTorch's linear layer and cross entropy in the place of Liger's,",
        f"by `megacpp_overlays run`, and with one import in front of it; nothing in it is edited. {found['steps']} steps, {found['sizes']}.",
        *(line for data in Data for line in _losses(found, data)),
        "",
        "In the second table the loss of stock falls, too: a wrong gradient need not show in a curve. Its grad_norm shows it.",
    ]


def _losses(found: Found, data: Data) -> list[str]:
    ways = [way for way in Way if Launch(data, way).name in found["runs"]]
    runs = {way: found["runs"][Launch(data, way).name] for way in ways}
    last = found["steps"] - 1
    places = sorted({round(last * part / 6) for part in range(7)})
    words = {Data.PROMPTS: "The first tokens of a row do not count", Data.WEIGHTS: "Every token counts, some more"}
    rows = [
        [str(place + 1), *(f"{runs[way][series][place]:.6g}" for series in ("losses", "norms") for way in ways)]
        for place in places
    ]
    heads = [f"{name}, {way.value}" for name in ("loss", "grad_norm") for way in ways]
    return ["", f"{words[data]}:", "", *table(["step", *heads], rows)]


def _liger_tests(found: Found) -> list[str]:
    return [
        "## Liger's own tests",
        "",
        f"`{found['file']}` of the source archive of liger-kernel 0.8.5, as it is,",
        f"against liger-kernel {found['with']['version']}; cases chosen by `-k '{found['chosen']}'`, because those of 1024 tokens",
        "over 4096 classes take minutes in Triton's interpreter. The interpreter has no `tanh`, so no case with a softcap runs.",
        "",
        *outcomes(found),
        "",
        "Repaired by overlays:",
        "",
        *(f"- `{name.partition('::')[2]}`" for name in repaired(found)),
    ]
