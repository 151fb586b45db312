"""What the command line prints and reads, without a server: tables, sizes, times, values of options, progress."""

from datetime import UTC, datetime, timedelta

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.cli import options, output, progress, table
from aenv.cli.commands.execute import command_line
from aenv.cli.commands.pull import default_name
from aenv.cli.shell import exit_code, refused_code
from aenv.cli.table import Cell, Column
from aenv.client.connect import CommandRefusedError, Ended
from aenv.template.ready import port_check, readable

COLUMNS = (
    Column("ID"),
    Column("NAME", cut=True),
    Column("CPU", right=True, spare=1),
    Column("SIZE", right=True, spare=2),
    Column("ABOUT", cut=True),
)
ROWS: list[list[str | Cell]] = [
    ["i" * 20, "a template's name", "1", "512 MiB", "x" * 60],
    ["j" * 20, Cell("red", "31"), "16", "4 GiB", ""],
]


def drawn(width: int | None, *, colours: bool = False) -> list[str]:
    return table.lines(COLUMNS, ROWS, width=width, colours=colours)


def test_a_table_is_as_wide_as_its_content_where_nobody_says_how_wide() -> None:
    titles, first, second = drawn(None)
    assert titles == "ID                    NAME               CPU     SIZE  ABOUT"
    assert first == f"{'i' * 20}  a template's name    1  512 MiB  {'x' * 60}"
    assert second == f"{'j' * 20}  red                 16    4 GiB"


def test_spare_columns_go_before_texts_become_short() -> None:
    titles, first, _ = drawn(66)
    assert titles.split() == ["ID", "NAME", "CPU", "ABOUT"]
    assert "a template's name" in first
    assert len(first) == 66


def test_ids_are_never_cut() -> None:
    for width in range(1, 120):
        _, first, second = drawn(width)
        assert first.startswith("i" * 20)
        assert second.startswith("j" * 20)


def test_colours_do_not_move_columns() -> None:
    plain, coloured = drawn(80), drawn(80, colours=True)
    assert "\033[31mred\033[0m" in coloured[2]
    assert [line.replace("\033[31m", "").replace("\033[1m", "").replace("\033[0m", "") for line in coloured] == plain


CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=6), st.integers(10, 100))
def test_columns_stand_below_each_other_whatever_is_in_them(rows: list[tuple[str, str, str]], width: int) -> None:
    columns = [Column("A", cut=True), Column("B", cut=True), Column("C", cut=True)]
    lines = table.lines(columns, [["|" + one, "|" + two, "|" + three] for one, two, three in rows], width=width,
                        colours=False)  # fmt: skip
    assert len(lines) == len(rows) + 1
    for line in lines:
        assert table.cells(line) <= width
        assert line.isprintable()


@given(CELLS, st.integers(1, 40))
def test_shortened_texts_fit(text: str, room: int) -> None:
    short = table.shortened(text, room)
    assert table.cells(short) <= room
    assert short == text or short[-1] == "…"


def test_what_a_guest_says_cannot_move_the_cursor() -> None:
    assert table.printable("a\033[2J\rb\n") == "a·[2J·b·"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (512 << 20, "512 MiB"), (5 << 40, "5120 GiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert output.bytes_text(count) == text


def test_shares_name_a_unit_once() -> None:
    assert output.share_text(35 << 20, 465 << 20) == "35 of 465 MiB"
    assert output.share_text(262 << 20, 4 << 30) == "262 MiB of 4 GiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (0.4, "0s"), (59, "59s"), (200, "3m 20s"), (3600, "1h"), (7500, "2h 5m"), (90061, "1d 1h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert output.duration_text(seconds) == text


def test_ages() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    assert output.age((now - timedelta(minutes=5)).isoformat(), now) == "5m"
    assert output.left((now + timedelta(hours=2)).isoformat(), now) == "2h"


@given(st.integers(0, 10**6))
def test_a_duration_in_words_is_short_of_it_by_less_than_its_last_unit(seconds: int) -> None:
    parts = output.duration_text(seconds).split()
    read = sum(options.DURATION.convert(part, None, None) for part in parts)
    below = {"d": 3600, "h": 60, "m": 1, "s": 1}[parts[0][-1]]
    assert 0 <= seconds - read < below


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400)])
def test_times_that_can_be_given(text: str, seconds: int) -> None:
    assert options.DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1", "1.5h", "1w", "1h30m"])
def test_times_that_cannot(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a length of time"):
        options.DURATION.convert(text, None, None)


def test_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "value")
    assert options.PAIR.convert("a=b=c", None, None) == ("a", "b=c")
    assert options.VARIABLE.convert("A=", None, None) == ("A", "")
    assert options.VARIABLE.convert("FROM_HERE", None, None) == ("FROM_HERE", "value")
    for kind, text in ((options.PAIR, "FROM_HERE"), (options.PAIR, "=x"), (options.VARIABLE, "NOT_SET")):
        with pytest.raises(click.BadParameter, match="is not NAME=VALUE"):
            kind.convert(text, None, None)


def test_progress_says_how_far_how_fast_and_how_long() -> None:
    line = progress.line("file.bin", 5 << 20, 20 << 20, 2.0, 90)
    assert line == "file.bin  ━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌   25%  5 of 20 MiB  2.5 MiB/s  6s left"
    assert progress.line("file.bin", 5 << 20, None, 2.0, 90) == "file.bin  5 MiB  2.5 MiB/s"


@given(CELLS.map(table.printable), st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.floats(0, 1e6),
       st.integers(20, 200))  # fmt: skip
def test_progress_stays_on_its_line(name: str, done: int, total: int, seconds: float, columns: int) -> None:
    assert table.cells(progress.line(name, done, total, seconds, columns)) <= columns


@pytest.mark.parametrize(
    ("arguments", "argv"),
    [
        (["ls"], ["ls"]),
        (["/bin/ls"], ["/bin/ls"]),
        (["ls", "-l; x"], ["ls", "-l; x"]),
        (["--", "ls", "--", "x"], ["ls", "--", "x"]),
    ],
)
def test_words_of_a_command(arguments: list[str], argv: list[str]) -> None:
    assert command_line(arguments) == argv


@pytest.mark.parametrize("text", ["ls -l", "a|b", "a > b", "$HOME", "a;b"])
def test_one_word_with_more_than_a_name_is_for_a_shell(text: str) -> None:
    program, *_, last = command_line([text])
    assert (program, last) == ("/bin/sh", text)


def test_exit_codes_after_signals() -> None:
    assert exit_code(Ended(3, "exit status 3")) == 3
    assert exit_code(Ended(-1, "signal: killed")) == 137
    assert exit_code(Ended(-1, "signal: segmentation fault (core dumped)")) == 139


@pytest.mark.parametrize(
    ("image", "name"),
    [("ubuntu:24.04", "ubuntu"), ("ghcr.io/Team/App", "app"), ("host:5000/a/b@sha256:00", "b")],
)
def test_a_template_is_called_as_its_image(image: str, name: str) -> None:
    assert default_name(image) == name


def test_the_check_of_a_port() -> None:
    assert "':1F90 [0-9A-F]*:0000 0A'" in port_check(8080)
    assert readable(f"waiting until ready: {port_check(80)}") == "waiting until ready: port 80 is open"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("executable 'x' not found in PATH", 127),
        ("executable 'two\nlines' not found in PATH", 127),
        ("error starting process '/x': executing the program: no such file or directory", 127),
        ("error starting process '/x': executing the program: permission denied", 126),
        ("error starting process '/x': executing the program: exec format error", 126),
        ("error starting process '/x': changing to the working directory: permission denied", 125),
        ("cwd '/x' does not exist", 125),
        ("unknown user", 125),
    ],
)
def test_why_a_command_was_not_run(message: str, code: int) -> None:
    assert refused_code(CommandRefusedError(message)) == code
