"""What commands share: the server, finding a sandbox by a part of its id, times as users write them."""

import re
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from aenv import __version__
from aenv.client import account
from aenv.client.api import Api, Json
from aenv.client.sandbox import SandboxClient
from aenv.client.transport import ApiError, Transport
from aenv.errors import AenvError

Made = TypeVar("Made")


def complete_sandbox(incomplete: str) -> list[tuple[str, str]]:
    """Ids for a shell's completion, each with a remark; none when the server cannot be asked."""
    try:
        found = connect().sandboxes()
    except AenvError:
        return []
    return [
        (item["sandboxID"], f"{item.get('alias', '')} {item['state']}".strip())
        for item in found
        if item["sandboxID"].startswith(incomplete)
    ]


def complete_template(incomplete: str) -> list[str]:
    """Names of templates for a shell's completion."""
    try:
        found = connect().templates()
    except AenvError:
        return []
    return [name for item in found for name in item["names"] if name.startswith(incomplete)]


SandboxArgument = Annotated[
    str,
    typer.Argument(
        metavar="SANDBOX",
        help="Id of the sandbox, or the beginning of it.",
        show_default=False,
        autocompletion=complete_sandbox,
    ),
]
SandboxesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SANDBOX...",
        help="Ids, or beginnings of ids.",
        show_default=False,
        autocompletion=complete_sandbox,
    ),
]

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def connect() -> Api:
    """The API of the account's server. Raises AenvError when there is no key for it."""
    found = account.load()
    if found.api_key is None:
        raise AenvError(
            f"There is no API key for {found.api_url}.",
            "Run `aenv auth login`, or set AENV_API_KEY. A node keeps its key in $AENV_HOME/api-key.",
        )
    headers = {"X-API-Key": found.api_key, "User-Agent": f"aenv/{__version__}"}
    return Api(_Transport(found.api_url, headers))


class _Transport(Transport):
    """Adds to the server's errors what a user of the command line can do about them."""

    def request(self, *arguments, **options):  # type: ignore[no-untyped-def]
        try:
            return super().request(*arguments, **options)
        except ApiError as error:
            if error.status == 401 and not error.hint:
                error.hint = f"The server is {self.url}. `aenv auth login` stores another key."
            raise


def find(api: Api, name: str) -> Json:
    """The sandbox with that id, or the only one whose id begins so. Raises AenvError."""
    try:
        return api.sandbox(name)
    except ApiError as error:
        if error.status != 404:
            raise
    matching = [item["sandboxID"] for item in api.sandboxes() if item["sandboxID"].startswith(name)]
    if len(matching) == 1:
        return api.sandbox(matching[0])
    if matching:
        raise AenvError(f"{name!r} is the beginning of {len(matching)} ids: {', '.join(sorted(matching)[:5])}.")
    raise AenvError(f"There is no sandbox {name!r}.", "`aenv ls` lists them.")


def guest(api: Api, sandbox: Json) -> SandboxClient:
    """To the inside of a running sandbox. Raises AenvError when it is paused."""
    name = sandbox["sandboxID"]
    if sandbox.get("state") == "paused":
        raise AenvError(f"Sandbox {name} is paused.", f"Resume it with `aenv resume {name}`.")
    return SandboxClient(api.transport, name, sandbox.get("envdAccessToken"))


def seconds(text: str) -> int:
    """A time such as ``90``, ``90s``, ``15m``, ``2h`` or ``1d``. Raises AenvError."""
    match = re.fullmatch(r"(\d+)([smhd]?)", text.strip())
    if match is None:
        raise AenvError(f"{text!r} is not a length of time.", "Write 90, 90s, 15m, 2h or 1d.")
    return int(match[1]) * _UNITS[match[2]]


def pairs(entries: list[str], what: str) -> dict[str, str]:
    """``NAME=VALUE`` entries; a name alone takes its value from the environment. Raises AenvError."""
    import os

    found = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals:
            if name not in os.environ or what != "variable":
                raise AenvError(f"{entry!r} is not NAME=VALUE.")
            value = os.environ[name]
        found[name] = value
    return found


def undoable(make: Callable[[], Made], undo: Callable[[Made], object]) -> Made:
    """The result of ``make``, a request that creates something. Ctrl-C waits for it, undoes it, and goes on up.

    The request runs on a thread, because an interrupted one may still succeed on the server.
    """
    import threading

    outcome: list[Made] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(make())
        except BaseException as error:
            failure.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(1.0)  # a join without a time would hold signals back
    except (KeyboardInterrupt, SystemExit):
        worker.join(60.0)
        if outcome:
            undo(outcome[0])
        raise
    if failure:
        raise failure[0]
    return outcome[0]
