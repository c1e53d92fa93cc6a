"""Releases of liger-kernel, each in processes of its own: the reports of `liger_grid.py` and its like on one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import warm_python
from places import ROOT, SUPPORT
from unpacked import unpacked

SMALL_BLOCKS = {"block_classes": 4}
BLOCKS = {"block_classes": 128}
"""Choices of memory: logits computed again, in several blocks."""


class Releases:
    """Runs a grid once for each release and setting that a test asks for."""

    def __init__(
        self,
        wheel: Callable[[str, str], Path],
        grid: str,
        is_measured: Callable[[str, Sequence[str]], bool] = lambda version, cases: False,
    ) -> None:
        self._wheel = wheel
        self._grid = SUPPORT / grid
        self._is_measured = is_measured
        self._reports: dict[object, dict[str, Any]] = {}

    def report(
        self,
        run_python: Callable[..., Any],
        version: str,
        cases: Iterable[str],
        *,
        device: str = "cpu",
        scale: int = 1,
        memory: dict[str, Any] | None = None,
        **variables: str,
    ) -> dict[str, Any]:
        """Return the results of the cases. The key of a run is its arguments, so each run happens once."""
        chosen = list(cases)
        memory = memory or (SMALL_BLOCKS if device == "cpu" else BLOCKS)
        key = (version, *chosen, device, scale, *memory.items(), *sorted(variables.items()))
        if key not in self._reports:
            done = self.python(
                run_python,
                version,
                f"import runpy; runpy.run_path({str(self._grid)!r}, run_name='__main__')",
                measured=self._is_measured(version, chosen),
                LIGER_GRID=json.dumps({"device": device, "scale": scale, "cases": chosen, "memory": memory}),
                TRITON_INTERPRET="1" if device == "cpu" else "0",
                **variables,
            )
            self._reports[key] = json.loads(done.stdout)
        return self._reports[key]

    def reproduced(self, run_python: Callable[..., Any], version: str, pack: str, *words: str) -> Any:
        """Return the observations of the cases of a pack in Triton's interpreter, with every overlay and with none.

        Args:
            run_python: the fixture.
            version: of liger-kernel.
            pack: two digits of its number.
            words: further ones of `reproduced.py`.
        """
        path = str(SUPPORT / "reproduced.py")
        code = f"import runpy, sys; sys.argv[1:] = {[pack, *words]}; runpy.run_path({path!r}, run_name='__main__')"
        return json.loads(self.python(run_python, version, code, TRITON_INTERPRET="1").stdout)

    def python(
        self, run_python: Callable[..., Any], version: str, code: str, *, measured: bool = False, **variables: str
    ) -> Any:
        """Run code in a fresh interpreter with a release on its path."""
        return run_python(
            code,
            unpacked(self._wheel("liger-kernel", version)),
            ROOT,
            SUPPORT,
            CUBLAS_WORKSPACE_CONFIG=":4096:8",  # deterministic products
            measured=measured,
            after=warm_python.INTERPRETER,
            **variables,
        )
