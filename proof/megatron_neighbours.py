"""Overlays of checkpoints with one of them switched off: the checkpoint that Megatron's launcher then saves, and the claims about it.

Both launches of a pair train alike, and nothing in their logs tells them apart. Their checkpoints do.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from claims import Claim, Found, Say, Verdict, Workplace
from megatron_launcher import Site, ended, prepared, tried
from megatron_series import apart
from processes import start

STEPS = 2
SAVE = ("--train-iters", str(STEPS), "--save-interval", str(STEPS), "--use-distributed-optimizer")
PADDING, ORDER = "fully-reshardable-padding", "float16-distributed-order"
MIXERS, EXEMPTION = "float16-mixer-parameters", "float16-fp32-exemption"
WAYS = ("on", "off")
TAKES = "2 launches of 2 steps"


@dataclass(frozen=True)
class Pair:
    """Two launches that differ in whether one overlay is on."""

    id: str
    off: str
    """The overlay that is switched off in the second one."""
    words: tuple[str, ...] = ()
    switched_on: str | None = None
    """An overlay that is off by default and on in both."""


BUCKETS = Pair(
    id="padding",
    off=PADDING,
    # Small buckets: a model of this size would have a single one, and nothing behind its padding.
    words=("--overlap-grad-reduce", "--dist-ckpt-optim-fully-reshardable", "--ddp-bucket-size", "20000"),
)
"""For the model of a CPU: sizes of the one on a GPU leave no padding."""
PARAMETERS = Pair(id="mixers", off=ORDER, switched_on=MIXERS)
"""For a model with Mamba layers."""


def measure(place: Workplace, say: Say) -> Found:
    """Return the decisions and the checkpoint of each launch, of the pairs that the model of this host is for."""
    site = prepared(place)
    pairs = [BUCKETS] if site.sizes.host == "cpu" else []
    pairs += [PARAMETERS] if "M" in site.sizes.pattern else []
    found = site.about()
    for pair in pairs:
        found[pair.id] = {}
        for number, way in enumerate(WAYS, start=1):
            began = time.monotonic()
            found[pair.id][way] = run = _saved(pair, way, site)
            seconds = time.monotonic() - began
            say(f"[{number}/{len(WAYS)}] Megatron: with {pair.off} {way}: {ended(run)}, {seconds:.0f} s")
    return found


def _saved(pair: Pair, way: str, site: Site) -> Found:
    folder = site.folder / f"{pair.id}-{way}"
    switches = {switch(pair.off): "off"} if way == "off" else {}
    switches |= {switch(pair.switched_on): "on"} if pair.switched_on else {}
    words = [*SAVE, *pair.words, "--save", str(folder)]
    run = tried(site, f"{pair.off} {way}", words, overlays=True, switches=switches)
    if "error" in run:
        return run
    checkpoint = folder / f"iter_{STEPS:07d}"
    kept = {"losses": run["losses"], "decisions": run["decisions"]}
    return {**kept, **(asked(checkpoint) if pair is BUCKETS else {"dtypes": dtypes(checkpoint)})}


def switch(overlay: str) -> str:
    """Return the name of the variable of an overlay."""
    return f"MEGACPP_OVERLAY_{overlay.upper().replace('-', '_')}"


def asked(checkpoint: Path) -> Found:
    """Return the output of `megacpp_overlays checkpoint` about one."""
    words = ["-m", "megacpp_overlays", "checkpoint", "--json", str(checkpoint)]
    said = json.loads(start(words, {}, cwd=checkpoint.parent, codes=(0, 1)))
    wrong = {each["name"]: each["says"] for each in said["parameters"] if not each["right"]}
    return {"verdict": said["verdict"], "parameters": len(said["parameters"]), "wrong": wrong}


def dtypes(checkpoint: Path) -> dict[str, str]:
    """Return the dtypes in which a checkpoint has A_log and D of Mamba mixers."""
    from torch.distributed.checkpoint import FileSystemReader

    tensors = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    mixers = re.compile(r"(?!optimizer).*\bmixer\.(A_log|D)")
    return {name: str(each.properties.dtype) for name, each in tensors.items() if mixers.fullmatch(name)}


def padding(found: Found) -> Verdict:
    """Judge that a checkpoint is right with the overlay and written broken without, and that losses do not show it."""
    on, off = (found[BUCKETS.id][way] for way in WAYS)
    if error := on.get("error") or off.get("error"):
        return Verdict.of(error, holds=False)
    figure = f"off: {off['verdict']}, {len(off['wrong'])} of {off['parameters']} parameters are not right"
    figure += "".join(f", {name}: {off['wrong'][name]}" for name in _telling(off))
    figure += f"; on: {on['verdict']}; losses of the two differ by {apart(off['losses'], on['losses']):.1e}"
    broken = off["verdict"] == "written broken" and bool(_telling(off))
    return Verdict.of(figure, holds=broken and on["verdict"] == "right" and off["losses"] == on["losses"])


def _telling(run: Found) -> list[str]:
    """Return the first parameter whose state is said to be that of others."""
    return [name for name, says in sorted(run["wrong"].items()) if "too far on" in says][:1]


def mixers(found: Found) -> Verdict:
    """Judge that parameters are kept in fp32 and saved with both overlays, and never kept with one that cannot save them.

    Without the neighbour a save of such parameters fails. So this project keeps none then, and says that it is in conflict.
    """
    on, off = (found[PARAMETERS.id][way] for way in WAYS)
    if "error" in on:
        return Verdict.of(f"on: {on['error']}", holds=False)
    kept = set(on["dtypes"].values()) == {"torch.float32"}
    figure = f"on: {_decisions(on)}, {len(on['dtypes'])} parameters saved in {_named(on)}; "
    if "error" in off:
        return Verdict.of(f"{figure}off: {off['error']}", holds=False)
    refused = {off["decisions"][name] for name in (MIXERS, EXEMPTION)} == {"conflict"}
    figure += f"off: {_decisions(off)}, {len(off['dtypes'])} parameters saved in {_named(off)}"
    return Verdict.of(
        figure, holds=kept and refused and bool(off["dtypes"]) and "torch.float32" not in off["dtypes"].values()
    )


def _decisions(run: Found) -> str:
    return ", ".join(f"{name} {run['decisions'][name]}" for name in (MIXERS, EXEMPTION))


def _named(run: Found) -> str:
    return " and ".join(sorted({each.removeprefix("torch.") for each in run["dtypes"].values()})) or "no dtype"


CLAIMS = (
    Claim(
        "megatron-padding",
        f"with `{PADDING}` switched off fully reshardable checkpoints hold the optimizer state of other parameters, with it their own",
        padding,
        asked=lambda found: BUCKETS.id in found,
    ),
    Claim(
        "megatron-mixers",
        f"`{MIXERS}` keeps A_log and D in fp32 and saves them; with its neighbour `{ORDER}` switched off, which a save of them needs, "
        "both it and the exemption are in conflict, and nothing is kept that could not be saved",
        mixers,
        asked=lambda found: PARAMETERS.id in found,
    ),
)
