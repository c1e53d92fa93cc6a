"""Arms a Python process whose `sitecustomize` is that of opentelemetry-instrument, which imports no other one.

It calls what is announced beside this file as `opentelemetry_pre_instrument`, before it instruments anything. Only a process
that was asked to arm has this folder on its path, see `sitecustomize` beside this.
"""

import os
import sys


def arm() -> None:
    """Do what `sitecustomize` does where it comes first, but for the next one: what runs now has taken that place."""
    if "megacpp_overlays" in sys.modules:
        return
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sitecustomize.py")
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, {"__name__": "megacpp_overlays_startup", "__file__": path})  # noqa: S102 - our own file
