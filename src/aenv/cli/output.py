"""What commands print: tables for a person, JSON for a program, sizes and times in words."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from aenv.cli import table as tables
from aenv.cli.table import Cell, Column

_COLOURS = {
    "running": "32",
    "ready": "32",
    "paused": "33",
    "building": "36",
    "waiting": "36",
    "error": "31",
}
DIM, BOLD, GREEN, YELLOW, RED = "2", "1", "32", "33", "31"
# Keys, texts, and everything else that has a colour, in indented JSON.
_JSON = re.compile(r'(?P<key>"(?:\\.|[^"\\])*")(?=:)|(?P<text>"(?:\\.|[^"\\])*")|(?P<other>\b(?:true|false|null)\b)')
_JSON_COLOURS = {"key": "1;34", "text": "32", "other": "35"}


def colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that shows colours, and the user wants them (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, code: str, stream: TextIO | None = None) -> str:
    return f"\033[{code}m{text}\033[0m" if code and text.strip() and colours(stream or sys.stdout) else text


def wants_json(chosen: str | None) -> bool:
    return chosen == "json" or (chosen is None and not sys.stdout.isatty())


def print_json(value: object) -> None:
    """Indented, and coloured on a terminal."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if colours(sys.stdout):
        text = _JSON.sub(lambda match: f"\033[{_JSON_COLOURS[match.lastgroup or 'text']}m{match[0]}\033[0m", text)
    print(text)


def width() -> int | None:
    """Columns of the terminal that standard output is; None if it is none: nothing is cut off in a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]], *, empty: str = "") -> None:
    """Print rows under their columns; ``empty`` is said without any."""
    found = list(rows)
    if not found and empty:
        print(empty)
        return
    for line in tables.lines(columns, found, width=width(), colours=colours(sys.stdout)):
        print(line)


def details(entries: Iterable[tuple[str, str | Cell]]) -> None:
    """Print names and values of one thing, below each other."""
    found = [(name, value if isinstance(value, Cell) else Cell(value)) for name, value in entries]
    longest = max((len(name) for name, _ in found), default=0)
    for name, value in found:
        print(f"{styled(name.ljust(longest), BOLD)}  {styled(tables.printable(value.text), value.style)}".rstrip())


def state(name: str) -> Cell:
    """The colour says the same as the word."""
    return Cell(name, _COLOURS.get(name, ""))


def say(message: str) -> None:
    """A remark for a person: on standard error, and only on a terminal."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)


def complain(message: str, hint: str = "") -> None:
    """An error on standard error: what happened, then what to do."""
    print(f"{styled('error:', '1;31', sys.stderr)} {message}", file=sys.stderr)
    if hint:
        print(styled(hint, DIM, sys.stderr), file=sys.stderr)


def bytes_text(count: float) -> str:
    """``512 MiB``, ``1.5 GiB``."""
    number, unit = _scaled(count)
    return f"{number} {unit}"


def share_text(used: float, total: float) -> str:
    """``35 of 465 MiB``, ``262 MiB of 3.9 GiB``."""
    number, unit = _scaled(used)
    whole, whole_unit = _scaled(total)
    return f"{number} of {whole} {unit}" if unit == whole_unit else f"{number} {unit} of {whole} {whole_unit}"


def _scaled(count: float) -> tuple[str, str]:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return (f"{count:.0f}" if unit == "B" or count >= 10 or count == int(count) else f"{count:.1f}"), unit


def duration_text(seconds: float) -> str:
    """The two largest units: ``45s``, ``3m 20s``, ``2h 5m``, ``4d 1h``."""
    whole = max(0, round(seconds))
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


def left(text: str, now: datetime | None = None) -> str:
    """How long it is until a time of the API."""
    return duration_text((moment(text) - (now or datetime.now(UTC))).total_seconds())


def local_time(text: str) -> str:
    return moment(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def metadata_text(metadata: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in metadata.items())
