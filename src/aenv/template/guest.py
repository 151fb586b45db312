"""What a build does in its guest: the user's commands, and scripts of our own. Output goes to the build's log."""

import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from aenv.client import files, process
from aenv.template import scripts
from aenv.template.context import Context
from aenv.template.journal import Journal
from aenv.template.lines import LineSplitter
from aenv.template.machine import BuildMachine
from aenv.vmm.liveness import while_alive

ARCHIVE = "/var/tmp/.template-build/archive"
_TAIL = 5  # lines of output that a failure repeats


class CommandFailedError(Exception):
    """A command of a build did not succeed. Its text is what the user reads after what was tried."""


def login_shell(command: str) -> list[str]:
    """How the SDK runs commands, too."""
    return ["/bin/bash", "-l", "-c", command]


class BuildGuest:
    def __init__(self, machine: BuildMachine, journal: Journal) -> None:
        self._machine = machine
        self._journal = journal

    async def run(self, command: str, context: Context, *, step: str, user: str | None = None) -> None:
        """Run a user's command to its end. Raises CommandFailedError."""
        await while_alive(
            self._machine.vm,
            self._logged(login_shell(command), user or context.user, context.env, context.workdir, step),
        )

    async def start(self, command: str, context: Context, *, step: str) -> None:
        """Run a command that stays; its output is logged as long as this is awaited. Raises CommandFailedError."""
        await self._logged(login_shell(command), context.user, context.env, context.workdir, step)

    async def check(self, command: str, context: Context) -> bool:
        """Whether a user's command succeeds now. Its output is not kept."""
        ended = await while_alive(
            self._machine.vm, self._quiet(login_shell(command), context.user, context.env, context.workdir)
        )
        return ended[0].exit_code == 0

    async def script(self, script: str, *parameters: str) -> str:
        """Run one of ``aenv.template.scripts`` as root; its standard output. Raises CommandFailedError."""
        return await self._script(scripts.command(script, *parameters))

    async def script_argv(self, argv: Sequence[str]) -> str:
        return await self._script(argv)

    async def set_path(self, path: str) -> None:
        """Make ``path`` the PATH of login shells, too."""
        await self.script(scripts.SET_PATH, shlex.quote(path))

    async def sync(self) -> None:
        """Write the guest's page cache to its disk, so that a layer's disk alone is complete."""
        await self.script("sync")

    async def upload(self, archive: Path) -> str:
        """Bring an archive into the guest; its path there."""
        await while_alive(self._machine.vm, files.upload(self._machine.host, archive, ARCHIVE, user="root"))
        return ARCHIVE

    async def _script(self, argv: Sequence[str]) -> str:
        ended, stdout, stderr = await while_alive(self._machine.vm, self._quiet(argv, "root", {}, "/"))
        if ended.exit_code != 0:
            raise CommandFailedError(stderr.strip() or stdout.strip() or ended.status)
        return stdout

    async def _quiet(
        self, argv: Sequence[str], user: str, env: Mapping[str, str], cwd: str | None
    ) -> tuple[process.Ended, str, str]:
        output = {"stdout": bytearray(), "stderr": bytearray()}
        ended = process.Ended(-1, "no exit status")
        try:
            async for event in process.events(self._machine.host, argv, user=user, envs=env, cwd=cwd):
                if isinstance(event, process.Output):
                    output[event.stream] += event.data[: 1 << 16]
                elif isinstance(event, process.Ended):
                    ended = event
        except process.CommandRefusedError as error:
            raise CommandFailedError(error.message) from error
        return ended, output["stdout"].decode(errors="replace"), output["stderr"].decode(errors="replace")

    async def _logged(
        self, argv: Sequence[str], user: str, env: Mapping[str, str], cwd: str | None, step: str
    ) -> None:
        splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        tail: deque[str] = deque(maxlen=_TAIL)
        ended = process.Ended(-1, "no exit status")

        def keep(lines: list[str]) -> None:
            for line in lines:
                tail.append(line)
                self._journal.write(line, step=step)

        try:
            async for event in process.events(self._machine.host, argv, user=user, envs=env, cwd=cwd):
                if isinstance(event, process.Output):
                    keep(splitters[event.stream].feed(event.data))
                elif isinstance(event, process.Ended):
                    ended = event
        except process.CommandRefusedError as error:
            raise CommandFailedError(error.message) from error
        for splitter in splitters.values():
            keep(splitter.end())
        if ended.exit_code != 0:
            said = " / ".join(line.strip() for line in tail if line.strip())
            raise CommandFailedError(f"{ended.status}" + (f"; its output ends with: {said[-1000:]}" if said else ""))
