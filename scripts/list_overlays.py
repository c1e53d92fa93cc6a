"""Write the list that answers for the declarations of this package until one is needed: megacpp_overlays/loader/listed.py.

list_overlays.py           write it
list_overlays.py --check   exit 1 if it differs from the declarations in `overlays/`
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from megacpp_overlays.loader import declarations, registry
from megacpp_overlays.loader import listed as listed_module

FILE = Path(listed_module.__file__)
_LIST = re.compile(r"^LISTED: .*?^\)\n|^LISTED: [^\n]*\n", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Write the list, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the list is out of step")
    given = parser.parse_args()
    found = declarations.listed(registry.load())
    if given.check:
        return int(found != listed_module.LISTED)
    rows = "".join(f"    {each!r},\n" for each in found)
    text = FILE.read_text(encoding="utf-8")
    FILE.write_text(
        _LIST.sub(lambda _: f"LISTED: tuple[DeclarationSummary, ...] = (\n{rows})\n", text), encoding="utf-8"
    )
    return subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(FILE)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
