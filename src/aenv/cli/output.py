"""What commands print: tables for a person, JSON for a program, sizes and times in words.

``rich`` is imported when a table is drawn, and not for JSON.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    Format | None,
    typer.Option(
        "-o",
        "--output",
        help="table or json; a table on a terminal, else JSON.",
        show_default=False,
        metavar="FORMAT",
    ),
]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print ids only.")]


def wants_json(chosen: Format | None) -> bool:
    return chosen is Format.JSON or (chosen is None and not sys.stdout.isatty())


def print_json(value: object) -> None:
    """Indented, and coloured on a terminal."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        from rich.json import JSON

        console().print(JSON(text))
    else:
        print(text)


def console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    # Without a terminal a table is as wide as its content: nothing is cut off in a file.
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else 10_000, soft_wrap=not terminal)


def table(
    columns: Sequence[str], rows: Iterable[Sequence["RenderableType"]], *, right: Sequence[str] = (), empty: str = ""
) -> None:
    """Print rows under their columns; columns named in ``right`` are numbers. ``empty`` is said without any."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for index, name in enumerate(columns):
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=len(name) if index else None,
        )
    count = 0
    for row in rows:
        made.add_row(*row)
        count += 1
    if count == 0 and empty:
        print(empty)
        return
    console().print(made)


def details(entries: Iterable[tuple[str, "RenderableType"]]) -> None:
    """Print names and values of one thing, below each other."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in entries:
        made.add_row(name, value)
    console().print(made)


_COLOURS = {
    "running": "green",
    "ready": "green",
    "paused": "yellow",
    "building": "cyan",
    "waiting": "cyan",
    "error": "red",
}


def state(name: str) -> str:
    """With rich's markup: the colour says the same as the word."""
    colour = _COLOURS.get(name, "white")
    return f"[{colour}]{name}[/]"


def say(message: str) -> None:
    """A remark for a person: on standard error, and only on a terminal."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)


def bytes_text(count: float) -> str:
    """``512 MiB``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 10 or count == int(count) else f"{count:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """The two largest units: ``45s``, ``3m 20s``, ``2h 5m``, ``4d 1h``."""
    whole = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if whole >= size or (unit == "s" and not parts):
            parts.append(f"{whole // size}{unit}")
            whole %= size
        elif parts:
            break
    return " ".join(parts[:2])


def moment(text: str) -> datetime:
    """A time of the API."""
    return datetime.fromisoformat(text)


def age(text: str, now: datetime | None = None) -> str:
    """How long ago a time of the API was."""
    return duration_text(((now or datetime.now(UTC)) - moment(text)).total_seconds())


def local_time(text: str) -> str:
    return moment(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def metadata_text(metadata: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in metadata.items())


def width() -> int:
    return shutil.get_terminal_size().columns
