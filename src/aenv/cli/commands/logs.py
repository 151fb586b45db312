"""``aenv logs``."""

import json
import sys
import time
from collections.abc import Iterator

import click

from aenv.cli import options, output, session, table
from aenv.cli.help import command
from aenv.client.api import Api, Json
from aenv.client.transport import ApiError
from aenv.errors import AenvError

POLL = 0.5  # seconds between two looks for new entries
PAGE = 1000  # entries of one answer at most
_COLOURS = {"debug": output.DIM, "warn": output.YELLOW, "error": output.RED}


@command(
    "logs",
    """
aenv logs i3zj
aenv logs i3zj -f --level info       # follow; without the console
aenv logs i3zj --tail 20 --search oom
""",
)
@options.sandbox_argument()
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until the sandbox is gone.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(0, PAGE, clamp=True),
    metavar="N",
    default=200,
    show_default=True,
    help="How many of the last entries, 1000 at most.",
)
@click.option(
    "--level",
    type=click.Choice(["debug", "info", "warn", "error"]),
    metavar="LEVEL",
    help="The least: debug, info, warn or error.",
)
@click.option("--search", metavar="TEXT", help="Only entries with this text.")
@options.output_option
def logs(sandbox: str, follow: bool, tail: int, level: str | None, search: str | None, form: str | None) -> None:
    """Show what happened to a sandbox, and its console.

    As JSON there is one object a line. The log of a deleted sandbox is kept for a while, under its whole id.
    """
    api = session.connect()
    show = _show_json if output.wants_json(form) else _show
    for entry in _entries(api, _name(api, sandbox), tail, level, search, follow):
        show(entry)
        if follow:
            sys.stdout.flush()


def _name(api: Api, sandbox: str) -> str:
    """The whole id; of a deleted sandbox as it was given."""
    try:
        return str(session.find(api, sandbox)["sandboxID"])
    except AenvError:
        return sandbox


def _entries(api: Api, name: str, tail: int, level: str | None, search: str | None, follow: bool) -> Iterator[Json]:
    """The last ``tail`` entries, oldest first, then new ones as they come."""
    found = api.logs(name, cursor=None, limit=tail, backward=True, level=level, search=search)[::-1]
    yield from found
    if not follow:
        return
    # The cursor is inclusive, and one millisecond may have several entries: those that were shown are left out.
    cursor = _milliseconds(found[-1]) if found else int(time.time() * 1000)
    shown = [entry for entry in found if _milliseconds(entry) == cursor]
    while True:
        try:
            new = api.logs(name, cursor=cursor, limit=PAGE, level=level, search=search)
        except ApiError as error:
            if error.status == 404:
                return
            raise
        fresh = [entry for entry in new if entry not in shown]
        yield from fresh
        if fresh:
            cursor = _milliseconds(new[-1])
            shown = [entry for entry in new if _milliseconds(entry) == cursor]
        elif _gone(api, name):
            return
        time.sleep(POLL)


def _gone(api: Api, name: str) -> bool:
    try:
        api.sandbox(name)
    except ApiError as error:
        return error.status == 404
    return False


def _milliseconds(entry: Json) -> int:
    return int(output.moment(entry["timestamp"]).timestamp() * 1000)


def _show_json(entry: Json) -> None:
    print(json.dumps(entry, ensure_ascii=False))


def _show(entry: Json) -> None:
    """One line an entry: time, level, message."""
    when = output.moment(entry["timestamp"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
    line = f"{when}  {entry['level']:<5}  {table.printable(entry['message'])}"
    print(output.styled(line, _COLOURS.get(entry["level"], "")))
