"""``aenv auth``."""

import sys

import click

from aenv.cli import help, options, output
from aenv.cli.help import command
from aenv.cli.table import Cell
from aenv.client import account
from aenv.client.api import Api
from aenv.client.transport import ApiError, Transport
from aenv.errors import AenvError

group = help.group(
    "auth",
    "Log in to a server, show or forget the login.",
    """
aenv auth login
aenv auth status
aenv auth logout
""",
)


@command(
    "login",
    """
aenv auth login                      # asks for address and key
aenv auth login --url https://aenv.example.org --key-stdin < key
""",
    of=group,
)
@click.option("--url", metavar="URL", help="Address of the server, such as http://host:8000.")
@click.option("--key-stdin", is_flag=True, help="Read the key from standard input.")
def login(url: str | None, key_stdin: bool) -> None:
    """Store a server's address and key in ~/.config/aenv/credentials, if the server accepts them."""
    if url is None and not sys.stdin.isatty():
        raise click.UsageError("--url is missing; without a terminal nothing can be asked.")
    url = (url or str(click.prompt("Address", default=account.load().api_url, err=True))).rstrip("/")
    key = sys.stdin.readline().strip() if key_stdin else str(click.prompt("API key", hide_input=True, err=True))
    check(url, key)
    path = account.credentials_path()
    account.save(path, url, key)
    output.say(f"Logged in to {url}; the key is in {path}.")


def check(url: str, key: str) -> None:
    """Raises AenvError unless the server accepts the key."""
    try:
        Api(Transport(url, {"X-API-Key": key})).team()
    except ApiError as error:
        if error.status == 401:
            raise AenvError(
                f"{url} does not accept this key.", "A node keeps its key in $AENV_HOME/api-key."
            ) from error
        raise


@command("status", "\naenv auth status\naenv auth status -o json\n", of=group)
@options.output_option
def status(form: str | None) -> None:
    """Show which server and key are used, and where they come from. The exit code is 1 if the key is not valid."""
    found = account.load()
    problem = ""
    if found.api_key is None:
        problem = "there is none"
    else:
        try:
            check(found.api_url, found.api_key)
        except AenvError as error:
            problem = error.message
    if output.wants_json(form):
        output.print_json(
            {
                "apiUrl": found.api_url,
                "apiUrlFrom": found.url_from,
                "apiKeyFrom": found.key_from or None,
                "valid": not problem,
                "problem": problem or None,
            }
        )
    else:
        masked = f"{found.api_key[:8]}…{found.api_key[-4:]}, from {found.key_from}" if found.api_key else "none"
        output.details(
            [
                ("Server", f"{found.api_url}, from {found.url_from}"),
                ("Key", masked),
                ("Accepted", Cell(f"no: {problem}", output.RED) if problem else Cell("yes", output.GREEN)),
            ]
        )
    if problem:
        raise click.exceptions.Exit(1)


@command("logout", "\naenv auth logout\n", of=group)
def logout() -> None:
    """Forget the stored address and key."""
    path = account.credentials_path()
    output.say(f"{path} removed." if account.remove(path) else f"There is no {path}.")
