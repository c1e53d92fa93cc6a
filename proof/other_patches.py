"""Run patches of other libraries in a process with overlays; write which names they replace and what the audit says.

other_patches.py --json proof/results/other-patches.json --write proof/results/other-patches.md
other_patches.py --json proof/results/other-patches.json --only verl

Every library gets two processes: its patches are applied before this package is imported, and after. Overlays that are off
by default are on. A function matters to an overlay if its probe says something else of the source without the body of that
function. The exit code is 1 where such a function was replaced and the audit does not name its replacement.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import other_patches_page
import read_bodies
from patched_libraries import AFTER, ALONE, BEFORE, LIBRARIES, UPSTREAMS
from processes import start

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Overlay
from megacpp_overlays.source.trees import CachedTree, InstalledTree, SourceTree

HERE = Path(__file__).resolve().parent
CHILD = HERE / "launchers/patched_process.py"
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
READ = ("megatron.core", "liger_kernel", "transformer_engine", "mamba_ssm")
"""Packages whose functions probes read."""
VERSIONS = (
    "megatron-core",
    "liger-kernel",
    "transformer-engine",
    "transformers",
    "torch",
    "verl",
    "mcore-bridge",
    "megatron-bridge",
    "nvidia-modelopt",
)
Measured = dict[str, Any]


def main() -> int:
    """Measure the libraries that are asked for, write the receipts and the page; return 1 if the audit missed something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json",
        type=Path,
        required=True,
        metavar="FILE",
        help="receipts; libraries that --only leaves out keep theirs",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page")
    parser.add_argument("--only", action="append", choices=LIBRARIES, help="a library; may be repeated")
    parser.add_argument(
        "--page-only", action="store_true", help="measure nothing, and write the page from the receipts"
    )
    given = parser.parse_args()
    found: Measured = json.loads(given.json.read_text()) if given.json.exists() else {"libraries": {}}
    if not given.page_only:
        for library in measure(found, given.only or LIBRARIES):
            print(f"== {library}", flush=True)
            found["libraries"] = {name: each for name in LIBRARIES if (each := found["libraries"].get(name))}
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.write:
        given.write.write_text(other_patches_page.markdown(found))
    missed = [line for name, each in found["libraries"].items() for line in unnoticed(name, each)]
    print("\n".join(missed or ["every replaced function that matters is named by the audit"]))
    return int(bool(missed))


def measure(found: Measured, libraries: Iterable[str]) -> Iterator[str]:
    """Run the processes and add their results to the receipts; yield each library when it is done."""
    overlays = [each for each in registry.load() if isinstance(each, Overlay)]
    targets = list(dict.fromkeys(each.target.module for each in overlays))
    tree = CachedTree(InstalledTree())
    found["versions"] = {name: importlib.metadata.version(name) for name in VERSIONS}
    found["alone"] = process(ALONE, ALONE, overlays, targets)["decisions"]
    for library in libraries:
        runs = {order: process(library, order, overlays, targets) for order in (BEFORE, AFTER)}
        found["libraries"][library] = {
            "replaced": replaced(runs, overlays, tree),
            "replaced_elsewhere": elsewhere(runs[BEFORE]),
            "derived": runs[BEFORE]["derived"],
            BEFORE: differences(found["alone"], runs[BEFORE]["decisions"]),
            AFTER: differences(runs[AFTER]["stock"], runs[AFTER]["decisions"]),
        }
        yield library


def process(library: str, order: str, overlays: Iterable[Overlay], targets: Iterable[str]) -> Measured:
    """Run one process with every overlay on, and return its result, without the folder of its packages."""
    switches = {f"MEGACPP_OVERLAY_{each.id.upper().replace('-', '_')}": "on" for each in overlays if each.opt_in}
    wrote = start([CHILD, library, order, *targets], ON_CPU | switches, cwd=HERE)
    line = next(line for line in reversed(wrote.splitlines()) if line.startswith('{"'))
    seen: Measured = json.loads(line.replace(f"{sysconfig.get_path('purelib')}/", ""))
    return seen


def replaced(runs: Mapping[str, Measured], overlays: Iterable[Overlay], tree: SourceTree) -> list[Measured]:
    """Return every replaced name of a package that probes read, with the parts of overlays that it matters to."""
    rows: dict[tuple[str, str], Measured] = {}
    for order, run in runs.items():
        for step in run["steps"]:
            for each in step["replaced"]:
                if in_packages(each["module"], READ):
                    new = {**each, "step": step["step"], "orders": []}
                    rows.setdefault((each["module"], each["symbol"]), new)["orders"].append(order)
    for (module, symbol), row in rows.items():
        parts = {
            *read_bodies.readers(overlays, tree, module, symbol),
            *read_bodies.readers(overlays, tree, *row["defined"]),
        }
        row["matters_to"] = [list(part) for part in sorted(parts)]
    return list(rows.values())


def elsewhere(run: Measured) -> dict[str, int]:
    """Return how many names were replaced in each of the other packages."""
    names = [each["module"] for step in run["steps"] for each in step["replaced"]]
    counts = {package: sum(in_packages(name, (package,)) for name in names) for package in UPSTREAMS}
    return {package: count for package, count in counts.items() if count and package not in READ}


def differences(stock: Iterable[Mapping[str, Any]], patched: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """Return the parts of which something else is said than without the patches."""
    was = {(each["id"], each["module"]): each for each in stock}
    return [
        {**each, "stock": before["decision"]}
        for each in patched
        if (before := was[each["id"], each["module"]]) and is_otherwise(before, each)
    ]


def is_otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two decisions differ in a field that the page shows."""
    return any(before[key] != now[key] for key in ("decision", "reason", "around"))


def unnoticed(library: str, found: Mapping[str, Any]) -> list[str]:
    """Return each function that matters to an overlay and was replaced without a word of it in the audit, as a sentence."""
    return [
        f"{library}, patched {order}: {part[0]} ({part[1]}) does not say that "
        f"{name['module']}.{name['symbol']} is {name['now']}"
        for order in (BEFORE, AFTER)
        for name in found["replaced"]
        for part in (name["matters_to"] if order in name["orders"] else ())
        if not other_patches_page.is_named(other_patches_page.decision_of(part, found[order]), name)
    ]


def in_packages(module: str, packages: Iterable[str]) -> bool:
    """Return whether a module belongs to one of some packages."""
    return any(module == each or module.startswith(f"{each}.") for each in packages)


if __name__ == "__main__":
    sys.exit(main())
