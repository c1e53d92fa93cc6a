"""The page of the measurements of mixer_parameters.py. Standard library only."""

from __future__ import annotations

from report import Found, table


def markdown(found: Found) -> str:
    """Return the page."""
    host = found["host"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = [
        "# A_log and D of Megatron's Mamba mixers, in fp32 and in bf16",
        "",
        "Written by `benchmarks/mixer_parameters/run.py`. `cast` is megatron-core as it is, `kept` the same with the overlay",
        "`float16-mixer-parameters` switched on. Errors are relative unless said otherwise.",
        "",
        f"- Date: {found['date']}",
        f"- Host: {host.get('gpu', 'no GPU')}, {host['machine']}, Python {host['python']}",
        f"- Versions: {versions}",
        f"- The run took {found['seconds']} s",
        "",
        *_rounding(found["rounding"]),
    ]
    if "training" in found:
        parts += [*_training(found), *_checkpoints(found["checkpoints"])]
    return "\n".join(parts)


def _rounding(found: Found) -> list[str]:
    decay, updates = found["decay"], found["updates"]
    rows = [[str(row["length"]), *(f"{row[key]:.1e}" for key in row if key != "length")] for row in found["outputs"]]
    titles = ["tokens", *(key for key in found["outputs"][0] if key != "length")]
    return [
        "## Rounding alone, in float64 on the CPU",
        "",
        f"A decay rate exp(A_log), for {decay['heads']} heads as Megatron draws them, moves by {decay['rate, root mean square']:.2%}",
        f"(root mean square), {decay['rate, largest']:.2%} at most. The remainder of a state moves by at most",
        f"{decay['left of a state, largest']:.2%} of its first value, after about one time constant. It does not grow with the length.",
        "",
        "Relative error (root mean square) of the outputs of a recurrence, compared with that from rounding its inputs:",
        "",
        *table(titles, rows),
        "",
        f"Updates: {updates['steps']} steps of Adam with learning rate {updates['learning rate']:g} move A_log by {updates['moved in fp32']:.3f}. The",
        "half-precision optimizers of Megatron keep an fp32 copy of cast parameters, so these steps arrive in both ways. With",
        f"`cast` the forward pass uses the copy rounded, off by at most {updates['used value off by, largest']:.4f}, and sees {updates['changes of a used value']:.0f} changes of it",
        f"in those steps. Without fp32 copies, which no mode here uses, it would have moved by {updates['moved without fp32 copies']:.3f}.",
        "",
    ]


def _training(found: Found) -> list[str]:
    size = found["size"]
    lines = [
        "## A small hybrid model",
        "",
        f"Two Mamba-2 layers, one of attention, an MLP; hidden size {size['hidden']}, {size['heads']} heads, state {size['state']}, {size['batch']} sequences of",
        f"{size['length']} tokens whose second half repeats the first. Every mode starts from the same numbers and sees the same",
        f"data, for {found['steps']} steps of Adam with learning rate 1e-3; fp32 is the reference. `kept again` is a second run of",
        "`kept`, compared with the first: the difference of two equal runs.",
        "",
    ]
    for when, title in (
        ("at the start", "With the parameters of the start"),
        ("at the end of fp32", "With the parameters that the fp32 run ends with"),
    ):
        keys = list(found["training"][0][when]["cast"])
        titles = ["seed", *(f"{key}, {mode}" for key in keys for mode in ("cast", "kept"))]
        rows = [
            [str(run["seed"]), *(f"{run[when][mode][key]:.2e}" for key in keys for mode in ("cast", "kept"))]
            for run in found["training"]
        ]
        lines += [
            f"{title}: distance from fp32 on data not trained on (losses of single tokens absolute, root mean square):",
            "",
            *table(titles, rows),
            "",
        ]
    titles = [
        "seed",
        "fp32",
        "cast",
        "kept",
        "cast from fp32",
        "kept from fp32",
        "kept again from kept",
        "A_log moved",
        "D moved",
    ]
    rows = [
        [
            str(run["seed"]),
            *(f"{run['last losses'][mode]:.5f}" for mode in ("fp32", "cast", "kept")),
            *(f"{run['differences of losses'][mode]:.1e}" for mode in ("cast", "kept", "kept again")),
            *(f"{run['moved'][name]:.3f}" for name in ("A_log", "D")),
        ]
        for run in found["training"]
    ]
    return [
        *lines,
        "Losses, means over the last 50 steps; distances of two runs are means of absolute differences of each step:",
        "",
        *table(titles, rows),
        "",
    ]


def _checkpoints(rows: list[Found]) -> list[str]:
    keys = ("in the files", "model", "model and optimizer", "fp32 values that train on")
    return [
        "## Checkpoints",
        "",
        "Saved in one mode and loaded in another, through files of Megatron's dist_checkpointing. `model` loads the",
        "parameters alone. The columns show A_log and D after loading.",
        "",
        *table(
            ["optimizer", "saved", "loaded", *keys],
            [[row["optimizer"], row["saved"], row["loaded"], *(row.get(key, "-") for key in keys)] for row in rows],
        ),
        "",
    ]
