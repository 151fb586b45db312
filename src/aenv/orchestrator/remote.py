"""Calls of the repository: they block, for minutes when a server hangs, and so run in threads of their own.

Captures, starts and records share asyncio's few threads; with the repository's calls among them, a node whose
repository hangs would soon pause and resume nothing at all.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

THREADS = 16  # calls under way at once; further ones wait for those

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="repository")


async def remotely(call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """``asyncio.to_thread`` for the repository."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(call, *args, **kwargs))
