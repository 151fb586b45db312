"""``aenv auth``."""

import sys
from typing import Annotated

import typer

from aenv.cli import output
from aenv.cli.help import command, group
from aenv.client import account
from aenv.client.api import Api
from aenv.client.transport import ApiError, Transport
from aenv.errors import AenvError

app = group(
    "Log in to a server, show or forget the login.",
    """
aenv auth login
aenv auth status
aenv auth logout
""",
)


@command(
    app,
    "login",
    """
aenv auth login                      # asks for address and key
aenv auth login --url https://aenv.example.org --key-stdin < key
""",
)
def login(
    url: Annotated[
        str | None, typer.Option("--url", help="Address of the server, such as http://host:8000.", show_default=False)
    ] = None,
    key_stdin: Annotated[bool, typer.Option("--key-stdin", help="Read the key from standard input.")] = False,
) -> None:
    """Store a server's address and key in ~/.config/aenv/credentials, if the server accepts them."""
    if url is None and not sys.stdin.isatty():
        raise AenvError("--url is missing.", "Without a terminal nothing can be asked.")
    url = (url or typer.prompt("Address", default=account.load().api_url, err=True)).rstrip("/")
    key = sys.stdin.readline().strip() if key_stdin else typer.prompt("API key", hide_input=True, err=True)
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


@command(app, "status", "\naenv auth status\naenv auth status -o json\n")
def status(form: output.OutputOption = None) -> None:
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
                ("Accepted", f"[red]no[/]: {problem}" if problem else "[green]yes[/]"),
            ]
        )
    if problem:
        raise typer.Exit(1)


@command(app, "logout", "\naenv auth logout\n")
def logout() -> None:
    """Forget the stored address and key."""
    path = account.credentials_path()
    output.say(f"{path} removed." if account.remove(path) else f"There is no {path}.")
