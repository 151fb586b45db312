"""Tables as lines of text that fit a terminal. Pure.

What a column may lose is said by the column: ids are never cut, a line rather breaks. Written here because the
tables of ``rich`` cut every column alike, and its import takes longer than a whole ``aenv ls``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import combining, east_asian_width

GAP = 2  # spaces between columns
ENOUGH = 20  # cells of a column that may be cut, from which on others are not dropped for it


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, and the SGR codes that it is shown with."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """``cut``: long texts may be cut. ``spare``: left out where room is missing, those with more first."""

    title: str
    right: bool = False
    cut: bool = False
    spare: int = 0


def cells(text: str) -> int:
    """Columns of a terminal that ``text`` takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def shortened(text: str, room: int) -> str:
    """``text`` within ``room`` cells, its end replaced by … if need be."""
    if cells(text) <= room:
        return text
    kept, left = "", room - 1
    for letter in text:
        left -= cells(letter)
        if left < 0:
            break
        kept += letter
    return kept + "…"


def printable(text: str) -> str:
    """``text`` without what would move the cursor or change colours: it may come from a guest."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "·" for letter in text)


def lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]], *, width: int | None, colours: bool
) -> list[str]:
    """Titles and rows. ``width`` None: as wide as its content."""
    content = [[_cell(value) for value in row] for row in rows]
    natural = [
        max([cells(column.title), *(cells(row[index].text) for row in content)])
        for index, column in enumerate(columns)
    ]
    shown, widths = _fit(columns, natural, width)
    titles = [Cell(column.title, "1") for column in columns]
    return [_line(columns, row, shown, widths, colours) for row in [titles, *content]]


def _cell(value: str | Cell) -> Cell:
    return Cell(printable(value)) if isinstance(value, str) else Cell(printable(value.text), value.style)


def _fit(columns: Sequence[Column], natural: Sequence[int], width: int | None) -> tuple[list[int], list[int]]:
    """Indices of the columns that are shown, and the width of every column."""
    shown, widths = list(range(len(columns))), list(natural)
    if width is None:
        return shown, widths

    def needed(least: int) -> int:
        sizes = [min(natural[index], least) if columns[index].cut else natural[index] for index in shown]
        return sum(sizes) + GAP * (len(shown) - 1)

    while needed(ENOUGH) > width and any(columns[index].spare for index in shown):
        shown.remove(max(shown, key=lambda index: (columns[index].spare, index)))
    while sum(widths[index] for index in shown) + GAP * (len(shown) - 1) > width:
        longest = max((index for index in shown if columns[index].cut), key=lambda index: widths[index], default=None)
        if longest is None or widths[longest] <= cells(columns[longest].title):
            break
        widths[longest] -= 1
    return shown, widths


def _line(
    columns: Sequence[Column], row: Sequence[Cell], shown: Sequence[int], widths: Sequence[int], colours: bool
) -> str:
    parts = []
    for index in shown:
        text = shortened(row[index].text, widths[index])
        space = " " * (widths[index] - cells(text))
        styled = f"\033[{row[index].style}m{text}\033[0m" if colours and row[index].style and text else text
        parts.append(space + styled if columns[index].right else styled + space)
    return (" " * GAP).join(parts).rstrip()
