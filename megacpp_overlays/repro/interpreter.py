"""Triton's interpreter on a CPU: block a case where it does not work with the installed numpy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megacpp_overlays.repro.case import Blocked


@contextlib.contextmanager
def triton_interpreter() -> Iterator[None]:
    """Run kernels of a case in Triton's interpreter, which `TRITON_INTERPRET=1` has switched on.

    Raises:
        Blocked: it does not work with the installed numpy. Triton 3.6 turns arrays of one element into numbers, which
            numpy refuses since 2.4.
    """
    import numpy  # noqa: PLC0415 - no dependency of this package
    import triton

    try:
        yield
    except Exception as error:
        if "only 0-dimensional arrays" not in str(error):
            raise
        versions = f"triton {triton.__version__} does not work with numpy {numpy.__version__}; take numpy below 2.4"
        raise Blocked(f"the interpreter of {versions}") from error
