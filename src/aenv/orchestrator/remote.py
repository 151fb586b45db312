"""Calls of the repository: they block, for minutes when a server hangs, and so run in threads of their own.

Captures, starts and records share asyncio's few threads; with the repository's calls among them, a node whose
repository hangs would soon pause and resume nothing at all. And a node that stops does not wait for them: to the
repository, it then is a node that crashed, which every one of its operations survives.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

THREADS = 16  # calls under way at once; further ones wait for those


class _Threads:
    """Daemon threads, which the end of the process does not wait for, as it does for those of an executor."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._count = self._free = 0

    def submit(self, future: asyncio.Future[Any], call: Callable[[], Any]) -> None:
        self._calls.put((future, call))
        with self._lock:
            self._free -= 1
            if self._free < 0 and self._count < THREADS:
                self._count, self._free = self._count + 1, self._free + 1
                threading.Thread(target=self._run, name=f"repository-{self._count}", daemon=True).start()

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            if not future.cancelled():
                _answer(future, call)
            with self._lock:
                self._free += 1
            del future, call


def _answer(future: asyncio.Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:
        settle = partial(_settle, future.set_exception, future, error)
    else:
        settle = partial(_settle, future.set_result, future, result)
    with suppress(RuntimeError):  # the loop was closed: nobody waits any more
        future.get_loop().call_soon_threadsafe(settle)


def _settle(setter: Callable[[Any], None], future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        setter(value)


_threads = _Threads()


async def remotely(call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """``asyncio.to_thread`` for the repository. A call that was cancelled may go on, unheard."""
    future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    _threads.submit(future, partial(call, *args, **kwargs))
    return await future
