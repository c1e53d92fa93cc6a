"""The order of questions to a host: one thread after the other, and an end when the host is to be left alone."""

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
"""How many threads in a row may get no whole answer; if one more gets none, the rest is left for another day."""


def one_by_one(
    keys: Sequence[Key], act: Callable[[Key], None], failures: dict[Key, str], before: HostError | None = None
) -> HostError | None:
    """Act on each thread; keep why one failed, and return why the rest was not tried.

    Args:
        keys: the threads, in order.
        act: asks about one.
        failures: why a thread got no answer; changed in place.
        before: why an earlier round ended; where that was the host's budget or the network, nothing is tried.

    Raises:
        RefusedError: the host does not take the token.
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
                # Those that never get an answer are always the first; the last one says whether the host is at fault.
                left.insert(0, left.pop(_elsewhere(left, in_a_row)))
            elif len(in_a_row) > _PATIENCE:
                stop = NoAnswerError(f"{len(in_a_row)} threads in a row got no whole answer, the last: {error}")
    failures.update({key: str(stop) for key in left if key not in failures})
    return stop


def _elsewhere(keys: Sequence[Key], failed: Sequence[Key]) -> int:
    """Return the place of the last thread of a repository in which none failed, or else of the last thread."""
    repositories = {repository for repository, _ in failed}
    others = [place for place, (repository, _) in enumerate(keys) if repository not in repositories]
    return others[-1] if others else len(keys) - 1
