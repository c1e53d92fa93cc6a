"""Repeatable random numbers for tests and fixtures without a generator of their own, whatever was drawn in this process before."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Draw from a seed made of a name, in Python, NumPy and PyTorch; afterwards go on with the numbers of before.

    Workers of pytest-xdist run tests in an order that differs from run to run. A module that is not imported stays so.
    CUDA is seeded where it is in use, and keeps that seed.
    """
    seed = zlib.crc32(name.encode())
    numpy, torch = (sys.modules.get(module) for module in ("numpy", "torch"))
    before = random.getstate()
    before_numpy = numpy.random.get_state() if numpy else None
    before_torch = torch.get_rng_state() if torch else None
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    if torch:
        # A CPU needs only this part of torch.manual_seed: the rest writes down a stack wherever CUDA is not in use yet.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(before_numpy)
        if torch:
            torch.set_rng_state(before_torch)
