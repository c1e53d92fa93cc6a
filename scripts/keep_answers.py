"""Write the answers of scripts that tests use to `tests/answers`, see `tests/support/kept_answers.py`.

`keep_answers.py WORD...` runs `pytest -m "not full" WORD...`. If all tests pass, the answers that they used are kept, and all
others are removed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from kept_answers import COMMITTED, DERIVED, KEEP  # noqa: E402 - found on the path that was set above


def main(words: list[str]) -> int:
    """Run pytest, write the answers, and return its exit code."""
    with tempfile.TemporaryDirectory() as used:
        command = [sys.executable, "-m", "pytest", "--quiet", "-m", "not full", *words]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, KEEP: used}, check=False)
        if done.returncode:
            return done.returncode
        keys = {path.name for path in Path(used).iterdir()}
    COMMITTED.mkdir(exist_ok=True)
    for path in COMMITTED.glob("*.*.json"):  # NAME.KEY.json, and not the kept passes
        if path.stem.rpartition(".")[2] not in keys:
            path.unlink()
    for key in keys:
        if not any(COMMITTED.glob(f"*.{key}.json")):
            text = (DERIVED / f"{key}.json").read_text()
            (COMMITTED / f"{json.loads(text)['script']}.{key}.json").write_text(text)
    print(f"tests/answers: {len(keys)} answers")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
