"""The passing of time, as the protocols of the repository need it; a test passes another one."""

import time
from collections.abc import Callable
from dataclasses import dataclass


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Clock:
    """``now`` is in seconds and counts also while the host is suspended, unlike ``time.monotonic``."""

    now: Callable[[], float] = _boot_time
    sleep: Callable[[float], None] = time.sleep
