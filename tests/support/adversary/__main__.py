"""Run the adversary and print its table and the offenders: `make adversary MUTANTS=30000 SEED=1`. Exit code 1 on any violation."""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ["MEGACPP_OVERLAYS"] = "off"  # nothing is to be armed here

from adversary import bases, campaign, judging
from megacpp_overlays.loader import registry


def main() -> int:
    """Parse the arguments, run, and print a table and the first offenders."""
    parser = argparse.ArgumentParser(prog="make adversary", description=__doc__)
    parser.add_argument("--mutants", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--show", type=int, default=campaign.SHOWN, help="offenders of each kind")
    parser.add_argument("--only", default="", help="a part of the names of the overlays")
    given = parser.parse_args()
    began = time.monotonic()
    parts = [each for each in registry.load() if given.only in bases.name_of(each)]
    made = bases.bases(parts)
    print(
        f"{len(made)} texts of {len(parts)} parts, read in {time.monotonic() - began:.0f} s; seed {given.seed}",
        flush=True,
    )
    found = campaign.run(made, given.mutants, given.seed, given.jobs)
    for texts in found.offenders.values():
        for text in texts[: given.show]:
            print(f"\n{text}")
    print(
        f"\n{found.table(made)}\n\n{time.monotonic() - began:.0f} s; "
        + ", ".join(f"{kind}: {found.violations[kind]}" for kind in judging.VIOLATIONS)
    )
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
