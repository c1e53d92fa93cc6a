"""Start-up hook for processes under `opentelemetry-instrument`, whose own `sitecustomize` hides the one in this folder.

OpenTelemetry's `sitecustomize` imports no other one. Before it instruments anything, it calls the entry points of the group
`opentelemetry_pre_instrument`, and this folder declares `arm` as one. The folder is on the PYTHONPATH of all children of a process
that asked for it. `sitecustomize.py` decides which of them it arms.
"""

import os
import sys


def arm() -> None:
    """Execute the `sitecustomize.py` of this folder, unless this package is imported already.

    It runs under another `__name__`, so it does not import the next `sitecustomize` on the path.
    """
    if "megacpp_overlays" in sys.modules:
        return
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sitecustomize.py")
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, {"__name__": "megacpp_overlays_startup", "__file__": path})  # noqa: S102 - our own file
