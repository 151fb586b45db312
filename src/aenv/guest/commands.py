"""Host programs that build guest artefacts: run one, report what went wrong in words a user can act on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from aenv.errors import AenvError

Progress = Callable[[str], None]
"""Called with one short line for each step that takes a noticeable time."""

_STOP_GRACE_S = 20.0


class GuestArtifactError(AenvError):
    """A guest artefact cannot be built; ``hint`` says what the user can do about it."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint)


class CommandFailedError(GuestArtifactError):
    """A host program ended with a non-zero status; ``output`` is the end of what it printed."""

    def __init__(self, message: str, *, hint: str, output: str) -> None:
        super().__init__(message, hint=hint)
        self.output = output


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write below ``path`` into GuestArtifactError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GuestArtifactError(
                f"No space left while writing {path}.", hint="Free space there, or set AENV_HOME to a larger disk."
            ) from error
        raise GuestArtifactError(
            f"Cannot write {path}: {error.strerror}.", hint="Check that AENV_HOME is writable by this user."
        ) from error


def workspace(parent: Path, prefix: str) -> Path:
    """A new empty directory in ``parent`` (made if missing), after removing what a crashed run left under ``prefix``.

    For one builder at a time: the node holds its home exclusively.
    """
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def write_durably(path: Path, data: bytes) -> None:
    """Write a file beside ``path`` and rename it there: readers see all of it or none, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


async def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    hint: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Progress | None = None,
) -> str:
    """Run a program without a shell and return its standard output and error, interleaved.

    ``env`` is added to this process's environment. The program gets a session of its own: on cancellation the
    whole group is asked to stop and, after a grace period, killed, so nothing it started outlives the call.

    Raises GuestArtifactError where the program is missing, CommandFailedError where it fails.
    """
    name = os.fspath(argv[0])
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C", **(env or {})},
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise GuestArtifactError(f"{name} is not installed.", hint="Run scripts/bootstrap.sh as root.") from error
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            lines.append(line)
            if on_line is not None:
                on_line(line)
        status = await process.wait()
    except BaseException:
        await _stop(process)
        raise
    output = "\n".join(lines)
    if status != 0:
        tail = "\n".join(lines[-12:])
        if "No space left on device" in output:
            hint = "The disk is full: free space, or set AENV_HOME to a larger disk."
        raise CommandFailedError(f"{name} failed with status {status}: {tail}", hint=hint, output=tail)
    return output


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the process group: TERM, then KILL once the grace period is over."""
    if process.returncode is not None:
        return
    for signum, patience in ((signal.SIGTERM, _STOP_GRACE_S), (signal.SIGKILL, _STOP_GRACE_S)):
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(patience):
                await process.wait()
            return
        except TimeoutError:
            continue
