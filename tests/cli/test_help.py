"""Help of every command: it is there, it has examples, and it is quick."""

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from aenv.cli import help
from aenv.cli.main import root

# What may be imported before a command is known: what a program waits for on each call.
HEAVY = ("aiohttp", "asyncio", "fastapi", "pydantic", "rich", "typer", "numpy", "structlog", "http.client", "ssl")


def commands(group: click.Group, above: click.Context | None = None) -> Iterator[tuple[click.Context, click.Command]]:
    context = click.Context(group, parent=above, info_name=group.name)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield click.Context(command, parent=context, info_name=name), command
        if isinstance(command, click.Group):
            yield from commands(command, context)


COMMANDS = list(commands(root))


@pytest.mark.parametrize(("context", "command"), COMMANDS, ids=[context.command_path for context, _ in COMMANDS])
def test_every_command_explains_itself(context: click.Context, command: click.Command) -> None:
    text = command.get_help(context)
    assert text.startswith(f"Usage: {context.command_path} [OPTIONS]")
    assert help.paragraphs(command)
    assert all(line.startswith("aenv ") or "aenv" in line for line, _ in help.examples(command))
    assert help.examples(command)
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{parameter.name} is not explained"
    assert max(map(len, text.splitlines())) <= 120


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    listed = {name for _, entries in root.sections for name, _, _ in entries}
    assert listed == {context.info_name for context, _ in COMMANDS if context.command_path.count(" ") == 1}
    for alias, name in root.aliases.items():
        assert root.get_command(click.Context(root), alias) is root.get_command(click.Context(root), name)


def test_help_imports_nothing_that_takes_long() -> None:
    script = f"""if True:
        import sys
        import aenv.cli.main
        assert aenv.cli.main.run(["--help"]) == 0
        print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_listing_imports_no_framework() -> None:
    script = f"""if True:
        import sys
        import aenv.cli.main
        aenv.cli.main.run(["ls"])
        print([name for name in {HEAVY[:-2]!r} if name in sys.modules])
    """
    environment = {"AENV_API_URL": "http://127.0.0.1:9", "AENV_API_KEY": "k", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
