"""The order of requests to a host: one thread after the other, with a stop when the host is exhausted or at fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megacpp_overlays.upkeep.sweep.host_errors import (
    HostError,
    NoAnswerError,
    RateLimitError,
    TokenRefusedError,
    UnreachableError,
)
from megacpp_overlays.upkeep.sweep.threads import Key

_PATIENCE = 3
"""Number of threads in a row that may get no complete answer; after one more, the rest is left for another day."""


def one_by_one(
    keys: Sequence[Key], act: Callable[[Key], None], failures: dict[Key, str], before: HostError | None = None
) -> HostError | None:
    """Act on each thread, record the reason of each failure, and return the error that stopped the round, or None.

    Args:
        keys: the threads, in order.
        act: asks the host about one thread.
        failures: the reasons why threads got no answer; changed in place.
        before: the error that stopped an earlier round; after a spent budget or an unreachable host, no thread is tried.

    Raises:
        TokenRefusedError: the host does not accept the token.
    """
    left = list(keys)
    stop: HostError | None = before if isinstance(before, (RateLimitError, UnreachableError)) else None
    in_a_row: list[Key] = []
    while left and stop is None:
        key = left.pop(0)
        try:
            act(key)
            failures.pop(key, None)
            in_a_row.clear()
        except TokenRefusedError:
            raise
        except (RateLimitError, UnreachableError) as error:
            left.insert(0, key)
            stop = error
        except HostError as error:
            failures[key] = str(error)
            in_a_row = [*in_a_row, key] if isinstance(error, NoAnswerError) else []
            if len(in_a_row) == _PATIENCE and left:
                # Threads that never get an answer come first. A thread from the end shows whether the host is at fault.
                left.insert(0, left.pop(_elsewhere(left, in_a_row)))
            elif len(in_a_row) > _PATIENCE:
                stop = NoAnswerError(f"{len(in_a_row)} threads in a row got no whole answer, the last: {error}")
    failures.update({key: str(stop) for key in left if key not in failures})
    return stop


def _elsewhere(keys: Sequence[Key], failed: Sequence[Key]) -> int:
    """Return the index of the last thread of a repository without failures, else of the last thread."""
    repositories = {repository for repository, _ in failed}
    others = [place for place, (repository, _) in enumerate(keys) if repository not in repositories]
    return others[-1] if others else len(keys) - 1
