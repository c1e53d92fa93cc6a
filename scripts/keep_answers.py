"""Write `tests/answers`: what scripts of tests print, so that a fresh clone runs none of which nothing has changed.

`keep_answers.py TEST...` runs tests as `make test` does, and keeps every answer that they use; others are removed. See
`tests/support/kept_answers.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMITTED, DERIVED = ROOT / "tests" / "answers", ROOT / ".cache" / "answers"
WORKERS = ("--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")


def main(tests: list[str]) -> int:
    """Run tests, and return their exit code; answers are written where all have passed."""
    with tempfile.TemporaryDirectory() as used:
        command = [sys.executable, "-m", "pytest", "--quiet", *WORKERS, "-m", "not full", *tests]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "KEPT_ANSWERS": used}, check=False)
        if done.returncode:
            return done.returncode
        keys = {path.name for path in Path(used).iterdir()}
    COMMITTED.mkdir(exist_ok=True)
    for path in COMMITTED.glob("*.json"):
        if path.stem.rpartition(".")[2] not in keys:
            path.unlink()
    for key in keys:
        if not any(COMMITTED.glob(f"*.{key}.json")):
            draft = (DERIVED / f"{key}.json").read_text()
            (COMMITTED / f"{_script(draft)}.{key}.json").write_text(draft)
    print(f"tests/answers: {len(keys)} answers")
    return 0


def _script(text: str) -> str:
    """Return the name of the script that an answer is of, which stands first in it."""
    name: str = text.split('"', 4)[3]
    return name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
