"""Orderly shutdown on a signal. Child processes run in sessions of their own, so only this process can end them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def by_exception() -> Iterator[None]:
    """Leave by an exception on SIGTERM and SIGHUP, so that every `finally` runs."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    asked = [signal.SIGTERM, signal.SIGHUP] if threading.current_thread() is threading.main_thread() else []
    # One that is ignored stays so: nohup.
    before = {number: signal.signal(number, leave) for number in asked if signal.getsignal(number) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
