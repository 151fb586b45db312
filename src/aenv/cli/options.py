"""Options and arguments that several commands have, and what their values may be."""

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from aenv.errors import AenvError

Function = TypeVar("Function", bound=Callable[..., Any])

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+)([smhd]?)")


class _Duration(click.ParamType[int]):
    """A length of time such as ``90``, ``90s``, ``15m``, ``2h`` or ``1d``, as seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            self.fail(f"{value!r} is not a length of time: write 90, 90s, 15m, 2h or 1d.", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


class _Pair(click.ParamType[tuple[str, str]]):
    """``NAME=VALUE``. Of a ``variable`` the name alone takes its value from the environment."""

    name = "pair"

    def __init__(self, *, variable: bool) -> None:
        self._variable = variable

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, equals, text = value.partition("=")
        if name and equals:
            return name, text
        if not self._variable or name not in os.environ:
            self.fail(f"{value!r} is not NAME=VALUE.", param, ctx)
        return name, os.environ[name]


DURATION = _Duration()
PAIR = _Pair(variable=False)
VARIABLE = _Pair(variable=True)


def _complete_sandbox(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids, each with a remark; none when the server cannot be asked."""
    from aenv.cli import session

    try:
        found = session.connect().sandboxes()
    except AenvError:
        return []
    return [
        CompletionItem(item["sandboxID"], help=f"{item.get('alias', '')} {item['state']}".strip())
        for item in found
        if item["sandboxID"].startswith(incomplete)
    ]


def _complete_template(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from aenv.cli import session

    try:
        found = session.connect().templates()
    except AenvError:
        return []
    return [CompletionItem(name) for item in found for name in item["names"] if name.startswith(incomplete)]


def sandbox_argument(**settings: Any) -> Callable[[Function], Function]:
    """One sandbox, or several with ``nargs=-1``."""
    many = settings.get("nargs") == -1
    return click.argument(
        "sandboxes" if many else "sandbox",
        **{
            "metavar": "SANDBOX..." if many else "SANDBOX",
            "help": "Ids, or beginnings of ids." if many else "Id of the sandbox, or the beginning of it.",
            "shell_complete": _complete_sandbox,
            **settings,
        },
    )


def template_argument(**settings: Any) -> Callable[[Function], Function]:
    return click.argument("template", metavar="TEMPLATE", shell_complete=_complete_template, **settings)


def timeout_option(help: str, default: str | None = "5m") -> Callable[[Function], Function]:
    return click.option(
        "--timeout", type=DURATION, metavar="TIME", help=help, default=default, show_default=default is not None
    )


user_option = click.option("-u", "--user", metavar="NAME", help="User in the sandbox; its default user if left out.")
workdir_option = click.option("-w", "--workdir", metavar="PATH", help="Folder in the sandbox to start in.")
environment_option = click.option(
    "-e",
    "--env",
    "environment",
    type=VARIABLE,
    metavar="NAME=VALUE",
    multiple=True,
    help="Variable of its commands; the name alone takes the value from here.",
)
metadata_option = click.option(
    "-m",
    "--metadata",
    type=PAIR,
    metavar="NAME=VALUE",
    multiple=True,
    help="To find it by; may be repeated.",
)
output_option = click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["table", "json"]),
    metavar="FORMAT",
    help="table or json; a table on a terminal, else JSON.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
cpu_option = click.option("--cpu", type=click.IntRange(min=1), metavar="N", help="vCPUs.")
memory_option = click.option("--mem", "memory", type=click.IntRange(min=1), metavar="MIB", help="Memory.")
