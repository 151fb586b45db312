"""``aenv doctor``."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Literal

import click

from aenv.cli import options, output, stages
from aenv.cli.help import command
from aenv.client import account
from aenv.client.api import Api
from aenv.client.transport import Transport
from aenv.errors import AenvError

NAME = 9  # cells of the longest name of a finding
LITTLE_DISK = 0.05  # share of free space below which a warning is due


@dataclass(frozen=True, slots=True)
class Finding:
    """``advice`` says what to do about what is not well."""

    what: str
    result: Literal["good", "unused", "warning", "bad"]
    text: str
    advice: str = ""


@command(
    "doctor",
    """
aenv doctor
aenv doctor --sandbox                # starts one, runs a command, deletes it
aenv doctor -o json
""",
)
@click.option("--sandbox", is_flag=True, help="Also start a sandbox and run a command in it.")
@options.output_option
def doctor(sandbox: bool, form: str | None) -> None:
    """Check the connection, the server, and which hypervisors run sandboxes there.

    Where no server answers, the hypervisors of this machine are tried. The exit code is 1 if something is wrong.
    """
    show = (lambda _: None) if output.wants_json(form) else _show
    found = []
    for finding in _examine(sandbox):
        found.append(finding)
        show(finding)
    if output.wants_json(form):
        output.print_json([asdict(finding) for finding in found])
    if any(finding.result == "bad" for finding in found):
        raise click.exceptions.Exit(1)


def _show(finding: Finding) -> None:
    marks = {
        "good": ("✓", output.GREEN),
        "unused": ("·", output.DIM),
        "warning": ("!", output.YELLOW),
        "bad": ("✗", output.RED),
    }
    mark, colour = marks[finding.result]
    head = f"{output.styled(mark, colour)} {output.styled(finding.what.ljust(NAME), output.BOLD)}  "
    indent = " " * (NAME + 4)
    width = (output.width() or 10_000) - len(indent)
    first, *others = wrap(finding.text, width) or [""]
    print(head + first)
    for line in others:
        print(indent + line)
    for line in wrap(finding.advice, width):
        print(indent + output.styled(line, output.DIM))
    sys.stdout.flush()


def _examine(sandbox: bool) -> Iterator[Finding]:
    found = account.load()
    yield Finding("Server", "good", f"{found.api_url}, from {found.url_from}")
    if found.api_key is None:
        yield Finding("Key", "bad", "there is none", "Run `aenv auth login`, or set AENV_API_KEY.")
    api = Api(Transport(found.api_url, {"X-API-Key": found.api_key or ""}))
    reached = _checked("Answers", lambda: _answers(api))
    yield reached
    if reached.result == "good" and found.api_key is not None:
        accepted = _checked("Key", lambda: _key(api, found.key_from))
        yield accepted
        if accepted.result == "good":
            yield from _server(api, sandbox)
            return
    yield from _machine()


def _checked(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except AenvError as error:
        return Finding(what, "bad", error.message, error.hint)


def _answers(api: Api) -> Finding:
    started = time.perf_counter()
    api.transport.request("GET", "/health", timeout=10)
    taken = (time.perf_counter() - started) * 1000
    return Finding("Answers", "good", f"in {taken:.0f} ms, version {api.version()}")


def _key(api: Api, origin: str) -> Finding:
    api.team()
    return Finding("Key", "good", f"accepted, from {origin}")


def _server(api: Api, sandbox: bool) -> Iterator[Finding]:
    for node in api.nodes():
        metrics = node["metrics"]
        disk = metrics["disks"][0]
        free = disk["totalBytes"] - disk["usedBytes"]
        memory = metrics["memoryTotalBytes"] - metrics["memoryUsedBytes"]
        little = free < disk["totalBytes"] * LITTLE_DISK
        text = (
            f"{node['id']} is {node['status']}: {node['sandboxCount']} running, "
            f"{output.bytes_text(free)} of disk and {output.bytes_text(memory)} of memory are free"
        )
        advice = "Delete sandboxes, snapshots or templates, or give the node's home more room." if little else ""
        yield Finding("Node", "warning" if little else "good", text, advice)
        yield from _hypervisors(api, node["id"])
    templates = api.templates()
    ready = [item for item in templates if item["buildStatus"] == "ready"]
    if ready:
        yield Finding("Templates", "good", f"{len(ready)} of {len(templates)} are ready")
    else:
        yield Finding("Templates", "bad", "none is ready", "`aenv-server setup` builds the base template.")
    if sandbox:
        yield _checked("Sandbox", lambda: _sandbox(api))


def _sandbox(api: Api) -> Finding:
    started = time.perf_counter()
    with stages.sandbox_of(api, "base") as client:
        created = time.perf_counter()
        code, text, _ = client.run("uname -r")
        answered = time.perf_counter()
    if code != 0:
        return Finding("Sandbox", "bad", f"its first command ended with {code}")
    return Finding(
        "Sandbox", "good",
        f"started in {(created - started) * 1000:.0f} ms, ran a command in {(answered - created) * 1000:.0f} ms, "
        f"kernel {text.decode().strip()}",
    )  # fmt: skip


def _hypervisors(api: Api, node_id: str) -> Iterator[Finding]:
    try:
        tried = api.hypervisors(node_id)
    except AenvError as error:
        yield Finding("Machine", "bad", error.message, error.hint)
        return
    for item in tried:
        name = f"{item['vmm']}/{item['accelerator']}{', in use' if item['used'] else ''}"
        yield _hypervisor(name, item["works"], item["reason"], item["advice"], any(i["works"] for i in tried))
    gaps = [gap for item in tried for gap in item["unconfined"]]
    if not gaps:
        yield Finding("Jail", "good", "hypervisors are confined: users, namespaces, empty roots, control groups")
    for gap in gaps:
        advice = "Sandboxes run; what breaks out of one is less confined. See docs/guides/hypervisors.md."
        yield Finding("Jail", "warning", gap, advice)


def _hypervisor(name: str, works: bool, reason: str, advice: str, usable: bool) -> Finding:
    """A candidate that does not work is bad only where none does."""
    return Finding("Machine", "good" if works else "unused" if usable else "bad", f"{name}: {reason}", advice)


def _machine() -> Iterator[Finding]:
    """Verdicts on this machine's hypervisors, where a node has been set up that this user may read."""
    import asyncio

    from aenv.config import Settings
    from aenv.vmm.choice import Hypervisors

    try:
        settings = Settings()  # type: ignore[call-arg]  # all fields have defaults
        kernels = sorted(settings.home.glob("artifacts/kernel-*/vmlinux"))
        initramfs = sorted(settings.home.glob("artifacts/initramfs-*.cpio"), key=lambda path: path.stat().st_mtime)
    except (AenvError, OSError, ValueError) as error:
        yield Finding("Machine", "warning", f"its configuration cannot be read: {error}")
        return
    kernel = settings.kernel or (kernels[-1] if kernels else None)
    if kernel is None or not initramfs:
        yield Finding("Machine", "warning", f"no node has been set up in {settings.home}",
                      "That is fine if the server is elsewhere. Else: `aenv-server setup`.")  # fmt: skip
        return

    def progress(message: str) -> None:
        output.say(f"  {message}")

    try:
        found = asyncio.run(Hypervisors(settings, Path(kernel), initramfs[-1], progress).verdicts())
    except (AenvError, OSError) as error:
        yield Finding("Machine", "bad", str(error))
        return
    usable = any(verdict.works for verdict in found)
    for verdict in found:
        yield _hypervisor(str(verdict.candidate), verdict.works, verdict.reason, verdict.advice, usable)
