"""What ``--help`` looks like, and commands that are imported when they are used.

Typer's own help draws boxes with rich, whose import takes longer than everything else of ``aenv --help``. Here it is
plain text with bold headings where the terminal has colours, and examples that can be copied.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import typer
from typer import _click as click  # Typer carries its own copy of Click
from typer.core import TyperCommand, TyperGroup

WIDTH = 100  # columns at most
_TYPE = re.compile(r"<([^<> ]+)>")  # as Typer shows the type of an option that has no metavar
_TYPES = {"str": "TEXT", "int": "N", "path": "PATH"}


def styled(text: str, code: str) -> str:
    """``text`` with an SGR attribute, where standard output shows colours."""
    shows = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{code}m{text}\033[0m" if shows else text


def bold(text: str) -> str:
    return styled(text, "1")


def _paragraphs(command: click.Command, formatter: click.HelpFormatter) -> None:
    for paragraph in (command.help or "").strip().split("\n\n"):
        formatter.write_paragraph()
        formatter.write_text(" ".join(paragraph.split()))


def _usage(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    pieces = [context.command_path, "[OPTIONS]", *map(_argument, _arguments(command))]
    if isinstance(command, TyperGroup):
        pieces.append("COMMAND ...")
    formatter.write(f"{bold('Usage:')} {' '.join(pieces)}\n")


def _arguments(command: click.Command) -> list[click.Parameter]:
    return [parameter for parameter in command.params if parameter.param_type_name == "argument"]


def _argument_name(parameter: click.Parameter) -> str:
    return parameter.metavar or (parameter.name or "").upper()


def _argument(parameter: click.Parameter) -> str:
    name = _argument_name(parameter)
    return name if parameter.required else f"[{name}]"


def _table(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        formatter.write_paragraph()
        formatter.write(f"{bold(title)}\n")
        formatter.indent()
        formatter.write_dl([(styled(name, "36"), text) for name, text in rows], col_max=34)
        formatter.dedent()


def _parameters(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    arguments: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        name, text = record
        if parameter.param_type_name == "argument":
            arguments.append((_argument_name(parameter), text.removesuffix("[required]").strip()))
        else:
            options.append((_TYPE.sub(lambda match: _TYPES.get(match[1], "VALUE"), name), text))
    _table(formatter, "Arguments:", [row for row in arguments if row[1]])
    _table(formatter, "Options:", options)


def _examples(command: click.Command, formatter: click.HelpFormatter) -> None:
    if command.epilog:
        formatter.write_paragraph()
        formatter.write(f"{bold('Examples:')}\n")
        for line in command.epilog.strip().splitlines():
            text, mark, remark = line.partition("  # ")
            formatter.write(f"  {text}{styled(mark + remark, '2')}\n")


class Command(TyperCommand):
    """One command. Its examples are its epilog, one per line, ``command  # remark``."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.width = min(formatter.width, WIDTH)
        _usage(self, ctx, formatter)
        _paragraphs(self, formatter)
        _parameters(self, ctx, formatter)
        _examples(self, formatter)


class Group(TyperGroup):
    """Commands under one name."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.width = min(formatter.width, WIDTH)
        _usage(self, ctx, formatter)
        _paragraphs(self, formatter)
        rows = [(name, self.commands[name].get_short_help_str(80)) for name in self.list_commands(ctx)]
        _table(formatter, "Commands:", rows)
        _parameters(self, ctx, formatter)
        _examples(self, formatter)


class LazyGroup(TyperGroup):
    """The root: knows its commands by name and one line, and imports the module of the one that is called."""

    sections: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = ()  # title, (name, module, line)
    aliases: dict[str, str] = {}  # noqa: RUF012 - a constant of the subclass

    def _modules(self) -> dict[str, str]:
        return {name: module for _, commands in self.sections for name, module, _ in commands}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self.aliases.get(cmd_name, cmd_name)
        if name not in self.commands:
            module = self._modules().get(name)
            if module is None:
                return None
            group: Any = typer.main.get_command(import_module(module).app)
            # A module with one command is that command; with a callback it is a group of its own.
            members = {name: group} if isinstance(group, Group) or not hasattr(group, "commands") else group.commands
            self.commands.update(members)
        return self.commands.get(name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = get_close_matches(args[0], [*self.list_commands(ctx), *self.aliases])
            meant = f" Did you mean {close[0]!r}?" if close else " `aenv --help` lists the commands."
            ctx.fail(f"There is no command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.width = min(formatter.width, WIDTH)
        _usage(self, ctx, formatter)
        _paragraphs(self, formatter)
        longest = max(map(len, self._modules()))
        for title, commands in self.sections:
            _table(formatter, title, [(name.ljust(longest), line) for name, _, line in commands])
        _parameters(self, ctx, formatter)
        _examples(self, formatter)


def application() -> typer.Typer:
    """A module's commands."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def group(help: str, examples: str) -> typer.Typer:
    """Commands under a common name."""
    made = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        cls=Group,
        help=help,
        epilog=examples,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_nothing)  # without a callback Typer makes a group of one command that command
    return made


def _nothing() -> None:
    pass


def command(
    app: typer.Typer, name: str, examples: str, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command of ``app``."""
    context = {"help_option_names": ["-h", "--help"], **settings.pop("context_settings", {})}
    return app.command(name, cls=Command, epilog=examples, context_settings=context, **settings)
