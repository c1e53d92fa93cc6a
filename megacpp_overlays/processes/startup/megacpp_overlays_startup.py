"""Arms a Python process whose `sitecustomize` is that of opentelemetry-instrument, which imports no other one.

It calls the entry points of the group `opentelemetry_pre_instrument`, of which this folder has one, before it instruments
anything. Only a process that was asked to arm has this folder on its path, see `sitecustomize.py` in this folder.
"""

import os
import sys


def arm() -> None:
    """Run the `sitecustomize.py` of this folder, which arms; under another name it imports no next `sitecustomize`."""
    if "megacpp_overlays" in sys.modules:
        return
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sitecustomize.py")
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, {"__name__": "megacpp_overlays_startup", "__file__": path})  # noqa: S102 - our own file
