"""A shell, or one program, on the user's terminal in a sandbox; what is said when it is left."""

import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from aenv.cli import session
from aenv.client.api import Api, Json
from aenv.client.connect import CommandRefusedError, Ended
from aenv.client.sandbox import ProcessStream, SandboxClient, Size
from aenv.client.transport import ApiError, UnreachableError
from aenv.errors import AenvError

NOT_RUN, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127  # codes when a command could not be run, as docker's
STAY = 60  # seconds that a sandbox lives on at least, however its time to live is, while somebody is in it
STAY_INTERVAL = 20.0
LOGIN_SHELL = ["/bin/sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi"]

# Names in envd's "signal: killed", from Go's os/exec, which E2B's envd uses; the shell's code is 128 and the number.
_SIGNALS = {
    "hangup": 1, "interrupt": 2, "quit": 3, "illegal instruction": 4, "trace/breakpoint trap": 5, "aborted": 6,
    "bus error": 7, "floating point exception": 8, "killed": 9, "user defined signal 1": 10,
    "segmentation fault": 11, "user defined signal 2": 12, "broken pipe": 13, "alarm clock": 14, "terminated": 15,
}  # fmt: skip


def exit_code(ended: Ended) -> int:
    """As a shell would show it: after a signal 128 and its number."""
    if ended.exit_code >= 0:
        return ended.exit_code
    name = ended.status.removeprefix("signal: ").partition(" (")[0]
    return 128 + _SIGNALS.get(name, 0)


def refused_code(error: CommandRefusedError) -> int:
    """As a shell would show it: 127 where there is no such program, 126 where it is none, 125 for other reasons.

    envd's messages: ``envd/src/process``.
    """
    if re.fullmatch(r"executable '.*' not found in PATH", error.message, re.DOTALL):
        return NOT_FOUND
    found = re.fullmatch(r"error starting process '.*': executing the program: (.*)", error.message, re.DOTALL)
    if found is None:
        return NOT_RUN
    return NOT_FOUND if found[1] in ("no such file or directory", "not a directory") else NOT_EXECUTABLE


class Attended:
    """Keeps a sandbox alive while somebody works in it."""

    def __init__(self, api: Api, sandbox_id: str) -> None:
        self._api = api
        self._id = sandbox_id
        self._over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            with suppress(AenvError):  # a connection that is lost for a while, or a sandbox that has ended
                self._api.refresh(self._id, STAY)
            self._over.wait(STAY_INTERVAL)


def on_terminal(
    api: Api,
    sandbox: Json,
    argv: Sequence[str],
    *,
    envs: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    pid: int | None = None,
) -> int:
    """Run ``argv`` on the user's terminal, or go back to process ``pid``; the exit code.

    Raises CommandRefusedError, terminal.LostError.
    """
    from aenv.cli import terminal

    client = session.guest(api, sandbox)

    def start(size: Size) -> ProcessStream:
        if pid is not None:
            return client.attach(pid)
        return client.start(argv, envs=terminal.environment() | dict(envs or {}), cwd=cwd, user=user, terminal=size)

    with Attended(api, client.sandbox_id):
        made = terminal.Terminal(client, start, lambda pid: _why_lost(api, client, pid))
        ended = made.run(redraw=pid is not None)
    return exit_code(ended)


def _why_lost(api: Api, client: SandboxClient, pid: int) -> AenvError | None:
    """What became of the sandbox, when that is why a program cannot be reached. None: the network, or nothing."""
    name = client.sandbox_id
    try:
        state = api.sandbox(name)["state"]
    except UnreachableError:
        return None
    except ApiError as error:
        if error.status == 404:
            return AenvError(f"Sandbox {name} was deleted.", "`aenv ls` lists the others.")
        return None
    if state == "paused":
        return AenvError(
            f"Sandbox {name} was paused.",
            f"`aenv connect {name} --pid {pid}` resumes it and goes back to your program.",
        )
    return None
