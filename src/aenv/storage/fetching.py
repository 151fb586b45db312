"""One range read of a source that may fail, stall or answer short: bounded tries, with waits between them."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from aenv.errors import AenvError, SourceError
from aenv.storage.source import Source


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Times are seconds."""

    attempts: int = 5
    first_wait: float = 0.1  # doubles with each failure, and up to half of it is taken off at random
    longest_wait: float = 3.0
    deadline: float = 60.0  # for the reader, from its request to its error, whatever the source does


def fetch(
    source: Source,
    offset: int,
    length: int,
    policy: FetchPolicy,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """``length`` bytes at ``offset``. Raises SourceError when the tries or the time are used up."""
    end = clock() + policy.deadline
    wait = policy.first_wait
    failure: Exception | None = None
    for attempt in range(policy.attempts):
        if attempt:
            pause = wait * random.uniform(0.5, 1.0)
            if clock() + pause >= end:
                break
            sleep(pause)
            wait = min(wait * 2, policy.longest_wait)
        try:
            data = source.read(offset, length)
        except (AenvError, OSError) as error:
            failure = error
            continue
        if len(data) == length:
            return data
        failure = SourceError(f"{len(data)} bytes came instead of {length}.")
    raise SourceError(f"{length} bytes at {offset} cannot be fetched: {failure}") from failure
