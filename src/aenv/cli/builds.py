"""Template builds from the client's side: request, start, follow the log to the end, clean up after Ctrl-C."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from aenv.cli import output, session
from aenv.cli.table import printable
from aenv.client.api import Api, Json
from aenv.client.transport import ApiError
from aenv.errors import AenvError
from aenv.template.ready import readable

POLL = 0.2  # seconds between two looks at a build's log


class BuildFailedError(AenvError):
    """``step`` is the number of the failed step as text, or ``base`` or ``finalize``."""

    def __init__(self, message: str, step: str | None) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True)
class Build:
    template_id: str
    build_id: str
    name: str
    is_new: bool  # there was no template of that name


def request(api: Api, name: str, *, cpu: int | None = None, memory: int | None = None) -> Build:
    """Begin a build. Ctrl-C leaves nothing of it."""
    is_new = not exists(api, name)
    body: Json = {"name": name}
    if cpu is not None:
        body["cpuCount"] = cpu
    if memory is not None:
        body["memoryMB"] = memory

    def request() -> Build:
        made = api.request_build(body)
        return Build(made["templateID"], made["buildID"], name, is_new)

    with session.undoable(request, lambda build: discard(api, build)) as build:
        return build


def exists(api: Api, name: str) -> bool:
    try:
        api.template(name.partition(":")[0])
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True


def entries(api: Api, build: Build) -> Iterator[Json]:
    """The log as it is written, to the build's end. Raises BuildFailedError."""
    offset = 0
    while True:
        status = api.build_status(build.template_id, build.build_id, offset)
        found = status["logEntries"]
        offset += len(found)
        yield from found
        if found:
            continue
        if status["status"] == "ready":
            return
        if status["status"] == "error":
            reason = status.get("reason") or {}
            raise BuildFailedError(reason.get("message") or "The build failed.", reason.get("step"))
        time.sleep(POLL)


def run(api: Api, build: Build, body: Json, show: Callable[[Json], None]) -> None:
    """Start a requested build and show its log to the end.

    A build that fails or is interrupted leaves nothing, and a template that was there as it was. Raises
    BuildFailedError.
    """
    try:
        api.start_build(build.template_id, build.build_id, body)
        for entry in entries(api, build):
            show(entry)
    except BaseException:
        discard(api, build)
        raise


def discard(api: Api, build: Build) -> None:
    """Cancel a build unless it has ended, and remove its template if this build was its first."""
    with suppress(AenvError):
        if build.is_new:
            api.delete_template(build.template_id)
        else:
            api.cancel_build(build.template_id, build.build_id)


class Printer:
    """Writes a build's log to standard error: headings of steps, and below each its output."""

    def __init__(self, headings: Mapping[str, str] | None = None) -> None:
        """``headings`` replace the server's own lines for steps, by number."""
        self._headings = headings or {}

    def show(self, entry: Json) -> None:
        step, message = entry.get("step"), entry["message"]
        if _is_heading(message, step):
            ours = self._headings.get(step or "")
            if ours is None:
                self.heading(message)
            else:
                self.heading(ours, "cached" if message.startswith("CACHED [") else "")
        elif step in ("base", "finalize"):
            self.heading(readable(message))
        else:
            self._write(f"  {output.styled(printable(message), output.DIM, sys.stderr)}")

    def heading(self, text: str, remark: str = "") -> None:
        remark = f"  {output.styled(remark, output.DIM, sys.stderr)}" if remark else ""
        self._write(output.styled(printable(text), output.BOLD, sys.stderr) + remark)

    @staticmethod
    def _write(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _is_heading(message: str, step: str | None) -> bool:
    return message.removeprefix("CACHED ").startswith(f"[{step}/")
