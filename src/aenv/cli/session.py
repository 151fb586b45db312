"""What commands share: the server, finding a sandbox by a part of its id, undoing what Ctrl-C interrupts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from click.exceptions import Exit

from aenv import __version__
from aenv.cli import output
from aenv.client import account
from aenv.client.api import Api, Json
from aenv.client.sandbox import SandboxClient
from aenv.client.transport import ApiError, Reply, Transport
from aenv.errors import AenvError

Made = TypeVar("Made")


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

    def request(self, *arguments: Any, **options: Any) -> Reply:
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


@contextmanager
def naming(kind: str, name: str) -> Iterator[None]:
    """Words for what the server does not find. ``kind`` is ``template`` or ``snapshot``. Raises AenvError."""
    try:
        yield
    except ApiError as error:
        if error.status != 404:
            raise
        raise AenvError(f"There is no {kind} {name!r}.", f"`aenv {kind.split()[0]} ls` lists them.") from error


def each(names: Sequence[str], work: Callable[[str], str]) -> None:
    """Do ``work`` to everything named and say what it gives. What fails does not keep the others from it.

    Raises the error of a single one; Exit with 1 when one of several failed.
    """
    failed = False
    for name in names:
        try:
            output.say(work(name))
        except AenvError as error:
            if len(names) == 1:
                raise
            output.complain(error.message if name in error.message else f"{name}: {error.message}", error.hint)
            failed = True
    if failed:
        raise Exit(1)


def guest(api: Api, sandbox: Json) -> SandboxClient:
    """To the inside of a running sandbox. Raises AenvError when it is paused."""
    name = sandbox["sandboxID"]
    if sandbox.get("state") == "paused":
        raise AenvError(f"Sandbox {name} is paused.", f"Resume it with `aenv resume {name}`.")
    return SandboxClient(api.transport, name, sandbox.get("envdAccessToken"))


@contextmanager
def undoable(make: Callable[[], Made], undo: Callable[[Made], object]) -> Iterator[Made]:
    """What ``make``, a request, creates. Ctrl-C undoes it until the block is left, in which the user is told of it.

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
        finally:
            over.set()

    # Not Thread.join: one that a signal interrupts takes the thread for ended (Python 3.11, bpo-45274).
    over = threading.Event()
    worker = threading.Thread(target=work, daemon=True)
    try:
        worker.start()
        while not over.wait(1.0):  # a wait without a time would hold signals back
            pass
        if failure:
            raise failure[0]
        yield outcome[0]
    except (KeyboardInterrupt, SystemExit):
        if worker.ident is not None:
            over.wait(60.0)
        if outcome:
            with suppress(AenvError):
                undo(outcome[0])
        raise
