"""Run in a fresh interpreter: the arguments of Megatron-LM by destination, with defaults and with the names of switches; JSON."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any


def main() -> None:
    """Answer on standard output."""
    said = os.dup(1)
    os.dup2(2, 1)  # upstream's output is no answer
    from megatron.training.arguments import add_megatron_arguments

    found: dict[str, dict[str, Any]] = {}
    for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions:
        row = found.setdefault(action.dest, {"default": None, "switches": []})
        is_plain = action.default is None or isinstance(action.default, bool | int | float | str)
        row["default"] = action.default if is_plain else str(action.default)
        row["switches"] += action.option_strings if action.nargs == 0 else []
    os.write(said, json.dumps(found).encode())


if __name__ == "__main__":
    main()
