"""What ``--help`` looks like, and commands that are imported when they are used.

Plain text with bold headings where the terminal has colours, and examples that can be copied.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import click

WIDTH = 100  # columns at most
_RANGE = re.compile(r"(  \[|; )(?:\d+<=)?x[<>]=\d+\]$")  # what click adds for an IntRange
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}


def styled(text: str, code: str) -> str:
    """``text`` with an SGR attribute, where standard output shows colours."""
    shows = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{code}m{text}\033[0m" if shows and text else text


def bold(text: str) -> str:
    return styled(text, "1")


def usage(command: click.Command, context: click.Context) -> str:
    pieces = [context.command_path, "[OPTIONS]", *map(_argument, _arguments(command))]
    if isinstance(command, click.Group):
        pieces.append("COMMAND ...")
    return " ".join(pieces)


def paragraphs(command: click.Command) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (command.help or "").strip().split("\n\n") if paragraph]


def parameters(command: click.Command, context: click.Context) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Arguments and options that have a help text, each with it."""
    arguments: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Argument):
            default = f"  [default: {parameter.default}]" if isinstance(parameter.default, str) else ""
            arguments.append((parameter.human_readable_name, (parameter.help or "") + default))
        elif (record := parameter.get_help_record(context)) is not None:
            name, text = record
            options.append((name, _RANGE.sub(lambda match: "]" if match[1] == "; " else "", text)))
    return [row for row in arguments if row[1]], options


def examples(command: click.Command) -> list[tuple[str, str]]:
    """Command and remark, one a line."""
    lines = (command.epilog or "").strip().splitlines()
    return [(text, mark + remark) for text, mark, remark in (line.partition("  # ") for line in lines)]


def _arguments(command: click.Command) -> list[click.Argument]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Argument)]


def _argument(parameter: click.Argument) -> str:
    name = parameter.human_readable_name
    return name if parameter.required else f"[{name}]"


def _table(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        formatter.write_paragraph()
        formatter.write(f"{bold(title)}\n")
        formatter.indent()
        formatter.write_dl([(styled(name, "36"), text) for name, text in rows], col_max=34)
        formatter.dedent()


class _Styled(click.Command):
    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"{bold('Usage:')} {usage(self, ctx)}\n")
        for paragraph in paragraphs(self):
            formatter.write_paragraph()
            formatter.write_text(paragraph)
        self.format_tables(ctx, formatter)
        if found := examples(self):
            formatter.write_paragraph()
            formatter.write(f"{bold('Examples:')}\n")
            for text, remark in found:
                formatter.write(f"  {text}{styled(remark, '2')}\n")

    def format_tables(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        arguments, options = parameters(self, ctx)
        _table(formatter, "Arguments:", arguments)
        _table(formatter, "Options:", options)


class Command(_Styled):
    """One command. Its examples are its epilog, one a line, ``command  # remark``."""


class Group(_Styled, click.Group):
    """Commands under one name."""

    def format_tables(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.commands[name].get_short_help_str(80)) for name in self.list_commands(ctx)]
        _table(formatter, "Commands:", rows)
        super().format_tables(ctx, formatter)


class LazyGroup(Group):
    """The root: knows its commands by name and one line, and imports the module of the one that is called."""

    # title, (name, "module:attribute", line)
    sections: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = ()
    aliases: dict[str, str] = {}  # noqa: RUF012 - a constant of the subclass

    def _places(self) -> dict[str, str]:
        return {name: place for _, commands in self.sections for name, place, _ in commands}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self.aliases.get(cmd_name, cmd_name)
        if name not in self.commands and (place := self._places().get(name)):
            module, _, attribute = place.partition(":")
            self.commands[name] = getattr(import_module(module), attribute)
        return self.commands.get(name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = get_close_matches(args[0], [*self.list_commands(ctx), *self.aliases])
            meant = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"There is no command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_tables(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, self._places()))
        for title, commands in self.sections:
            _table(formatter, title, [(name.ljust(longest), line) for name, _, line in commands])
        _table(formatter, "Options:", parameters(self, ctx)[1])


def command(
    name: str, examples: str, *, of: click.Group | None = None, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command, of the group ``of`` if that is given."""
    settings["context_settings"] = {**_HELP, **settings.get("context_settings", {})}

    def make(function: Callable[..., Any]) -> click.Command:
        made = click.command(name, cls=Command, epilog=examples, **settings)(function)
        if of is not None:
            of.add_command(made)
        return made

    return make


def group(name: str, help: str, examples: str) -> Group:
    """Commands under a common name."""
    return Group(name, help=help, epilog=examples, no_args_is_help=True, context_settings=_HELP)
