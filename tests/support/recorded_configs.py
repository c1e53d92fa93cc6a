"""Run in a fresh interpreter: the configuration objects of Megatron that the cases of a pack make on a CPU, stock; JSON by overlay.

    python tests/support/recorded_configs.py PACK

The release is the one that is first on the path. Ranks are forks, so each process appends the objects that it makes to one file.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from megacpp_overlays.concerns.process import _CONFIGS, _KEYS, _fields
from megacpp_overlays.repro import Blocked, TargetAbsent, inventory

PACKS = Path(__file__).parents[2] / "packs"


def _record_into(file: Path) -> None:
    """Have every object of a configuration class write down its fields when it is made, and each that is set."""

    def recording(name: str, kind: type[Any]) -> None:
        original = kind.__init__

        def write(fields: dict[str, Any]) -> None:
            plain = {key: value if _is_plain(value) else str(value) for key, value in fields.items()}
            with file.open("a") as lines:
                lines.write(json.dumps([name, plain]) + "\n")

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            write({key: value for key, (value,) in _fields(self).items()})

        def __setattr__(self: Any, key: str, value: Any) -> None:  # noqa: N807
            object.__setattr__(self, key, value)
            if key in _KEYS:
                write({key: value})

        kind.__init__ = __init__  # type: ignore[method-assign]
        kind.__setattr__ = __setattr__  # type: ignore[method-assign,assignment]

    for name, module in _CONFIGS.items():
        recording(name, vars(importlib.import_module(module))[name])
    latent = importlib.import_module(_CONFIGS["TransformerConfig"]).MLATransformerConfig
    recording("TransformerConfig", latent)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def main() -> None:
    """Answer on standard output."""
    (path,) = PACKS.glob(f"{sys.argv[1]}*/reproduce.py")
    said = os.dup(1)
    os.dup2(2, 1)  # upstream's output is no answer
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "made")
        _record_into(file)
        for case in inventory.load_cases(path):
            if case.device != "cpu" or case.overlay is None:
                continue
            file.write_text("")
            os.environ.update(case.environment)
            try:
                case.run()
            except (TargetAbsent, Blocked):
                continue
            except Exception as error:  # noqa: BLE001 - stock upstream may end in the error that the case is about
                sys.stderr.write(f"{case.name}: {type(error).__name__}: {error}\n")
            found.setdefault(case.overlay, []).extend(json.loads(line) for line in file.read_text().splitlines())
    os.write(said, json.dumps(found).encode())


if __name__ == "__main__":
    main()
