"""The page and the plot of the measurements of run.py. Standard library only, so that any host can make them again.

python benchmarks/dsa_training/page.py FILE.json [--write FILE.md] [--plot FILE.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # parts are named from the folder of all benchmarks
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Iterator

from dsa_training.plot import TITLE, TRUTH, apart, svg
from report import Found, main, ms, number, table, whole

STOCK = "stock"
RUNS = ("", "first loss", "middle", "last", "indexer's loss, last", "forward and backward, ms", "peak, MiB")
APART = ("", "loss, most", "mean", "gradient norm, most", "mean")


def markdown(found: Found) -> str:
    """Return the page."""
    return whole(TITLE, found, section(found))


def section(found: Found) -> Iterator[str]:
    """Yield the description of the model, a table of times, and the differences of runs."""
    size, ways = found["size"], found["ways"]
    yield from [
        "Written by `benchmarks/dsa_training/run.py`. A HybridModel of Megatron with "
        f"{size['layers']} layers of absorbed latent attention that is sparse,",
        f"hidden size {size['hidden']}, {size['heads']} heads, {size['latent'] + size['rotary']}/{size['latent']} channels, an indexer of "
        f"{size['indexer_heads']} heads of {size['indexer']} channels that learns by its sparse loss,",
        f"{size['chosen']} of {size['tokens']} keys chosen; one document of {size['tokens']} tokens a step, AdamW in float32 with a "
        f"learning rate of {found['rate']:g}, the same weights and documents for all.",
        "Stock is megatron-core without an overlay and with `dsa_kernel_backend=none`; ways that are not marked float32 are bfloat16. The "
        "same function with the",
        "channels of hidden states in another order rounds otherwise. Milliseconds are medians of the later half of the steps, ways one after another; memory is above",
        "weights and optimizer.",
        "",
        f"![Losses, and how far each way is from float32]({found.get('plot', 'dsa_training.svg')})",
        "",
        *table(RUNS, runs(ways)),
    ]
    if called := found.get("calls"):
        yield from [
            "",
            f"Called under overlays: {', '.join(f'`{name}` {count} times' for name, count in called.items())}.",
        ]
    for base, label in ((TRUTH, "stock in float32"), (STOCK, "stock in bfloat16")):
        if base in ways:
            yield from ["", f"Relative differences from {label}, over {len(ways[base]['losses'])} steps:", ""]
            yield from table(APART, differences(ways, base))
    if verdict := judged(ways):
        yield from ["", verdict]


def runs(ways: Found) -> Iterator[tuple[str, ...]]:
    """Yield a row for each way."""
    for name, one in ways.items():
        losses = one["losses"]
        shown = (losses[0], losses[len(losses) // 2], losses[-1], one["indexer_losses"][-1])
        yield name, *(f"{each:.4f}" for each in shown[:3]), f"{shown[3]:.3e}", ms(one["ms"]), number(one["mib"], ".0f")


def differences(ways: Found, base: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each other way."""
    for name, one in ways.items():
        if name == base:
            continue
        cells = []
        for series in ("losses", "grad_norms"):
            each = apart(one[series], ways[base][series])
            cells += [f"{max(each):.1e}", f"{sum(each) / len(each):.1e}"]
        yield name, *cells


def judged(ways: Found) -> str | None:
    """Return in a sentence whether overlays are as near to float32 as stock, in whatever order, is."""
    stock = [each for name, each in ways.items() if name.startswith(STOCK) and name not in {TRUTH, "stock, tilelang"}]
    if TRUTH not in ways or "overlays" not in ways or not stock:
        return None

    def furthest(one: Found) -> float:
        return max(apart(one["losses"], ways[TRUTH]["losses"]))

    most, ours = max(furthest(each) for each in stock), furthest(ways["overlays"])
    return (
        f"The losses under overlays are at most {ours:.1e} from those of float32, {ours / most:.2f} times as far as stock in bfloat16 "
        f"gets, {most:.1e}."
        if most
        else "Stock in bfloat16 has the losses of float32."
    )


if __name__ == "__main__":
    main("Page and plot of training with DeepSeek sparse attention.", markdown, svg)
