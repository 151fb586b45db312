#!/usr/bin/env python3
"""Write docs/reference/cli.md from the commands of ``aenv`` themselves.

scripts/cli_reference.py           write the file
scripts/cli_reference.py --check   exit with 1 if the committed file is not what would be written
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from aenv.cli import help
from aenv.cli.main import root

TARGET = Path(__file__).parents[1] / "docs/reference/cli.md"

HEAD = """# Command line

<!-- Written by scripts/cli_reference.py. Do not edit: change aenv.cli and run it again. -->

`aenv` talks to a server over HTTP. How it is used day by day: [the command line](../guides/cli.md).

**Server and key** are each the first of these that is set:

1. `AENV_API_URL` and `AENV_API_KEY`;
2. `E2B_API_URL` and `E2B_API_KEY`;
3. `~/.config/aenv/credentials` (`$XDG_CONFIG_HOME` is honoured), which `aenv auth login` writes with mode 0600;
4. the node on this machine: port `$AENV_PORT` or 8000, and the key in `$AENV_HOME/api-key` if it may be read.

The key of 3 and 4 is sent to that place's server alone.

**Sandboxes** may be named by the beginning of their id, if no other id begins so. Times are written `90`, `90s`,
`15m`, `2h` or `1d`.

**Output**: a table on a terminal, JSON in a pipe or file; `--output` overrides. Remarks and errors go to standard
error. No colours where `NO_COLOR` is set, `TERM` is `dumb`, or there is no terminal. JSON is what the server's API
answered: `GET /openapi.json` describes it.

| exit code | means |
|---:|---|
| 0 | it worked |
| 1 | it did not; the message says why and what to do |
| 2 | wrong usage |
| 125 | `exec`: the command could not be run |
| 128 + n | ended by signal n: 130 after Ctrl-C |
| other | `exec`, `start`, `connect`: the exit code of the command or shell |
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def commands(group: click.Group, above: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """The commands below a group, groups without options of their own replaced by what is in them."""
    for name in group.list_commands(above):
        command = group.get_command(above, name)
        assert command is not None
        context = click.Context(command, parent=above, info_name=name)
        if isinstance(command, click.Group):
            yield from commands(command, context)
        else:
            yield command, context


def names_of(name: str, command: click.Command) -> str:
    """The other names that a command of the root has."""
    others = [alias for alias, target in root.aliases.items() if target == name]
    return f" Also `aenv {'`, `aenv '.join(others)}`." if others else ""


def page(command: click.Command, context: click.Context) -> Iterator[str]:
    path = context.command_path
    yield f"### {path}"
    yield ""
    yield f"`{help.usage(command, context)}`"
    for index, paragraph in enumerate(help.paragraphs(command)):
        yield ""
        yield paragraph + (names_of(path.removeprefix("aenv "), command) if index == 0 else "")
    arguments, options = help.parameters(command, context)
    rows = [*arguments, *(row for row in options if "--help" not in row[0])]
    if rows:
        yield from ["", "| | |", "|---|---|"]
        yield from (f"| `{cell(name)}` | {cell(text).replace('  [', ' [')} |" for name, text in rows)
    yield from ["", "```sh", *(text + remark for text, remark in help.examples(command)), "```", ""]


def render() -> str:
    top = click.Context(root, info_name="aenv")
    lines = [HEAD]
    for title, entries in root.sections:
        lines += [f"## {title.removesuffix(':')}", ""]
        for name, _, _ in entries:
            command = root.get_command(top, name)
            assert command is not None
            context = click.Context(command, parent=top, info_name=name)
            found = commands(command, context) if isinstance(command, click.Group) else [(command, context)]
            for each, its_context in found:
                lines += page(each, its_context)
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    text = render()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != text:
            sys.exit(f"{TARGET} is not up to date: run scripts/cli_reference.py")
        return
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
