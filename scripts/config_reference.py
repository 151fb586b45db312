#!/usr/bin/env python3
"""Write docs/reference/configuration.md from ``aenv.config.Settings`` and the options of ``aenv-server``.

scripts/config_reference.py           write the file
scripts/config_reference.py --check   exit with 1 if the committed file is not what would be written
"""

import json
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aenv.config import DEFAULT_CONFIG_FILE, Settings
from aenv.server import cli

TARGET = Path(__file__).parents[1] / "docs/reference/configuration.md"

# A section begins at the setting named; a new setting falls into the section it stands in.
SECTIONS = {
    "home": "Files",
    "host": "API and proxy",
    "vmm": "Hypervisor and guest",
    "default_vcpus": "Machines of templates",
    "max_sandboxes": "Limits and pools",
    "slot_cidr": "Network",
    "registries": "Images",
    "repository": "Repository of snapshots",
    "max_builds": "Template builds",
    "log_level": "Logs and metrics",
}

HEAD = f"""# Configuration

<!-- Written by scripts/config_reference.py. Do not edit: change aenv.config.Settings and run it again. -->

Every setting has a default, so a node runs without any configuration. A setting is taken from the first of

1. the command line of `aenv-server` (only the options [below](#command-line));
2. the environment: setting `x` is `AENV_X`, setting `y` of a table `x` is `AENV_X__Y`;
3. the TOML file that `AENV_CONFIG` names, or `{DEFAULT_CONFIG_FILE}` when `AENV_CONFIG` is not set;
4. the default.

A key in the file that is no setting, and a value of the wrong type or out of range, end the start with an error that
names it. An environment variable `AENV_*` that is no setting is ignored. Sizes are MiB and times are seconds unless a
name says otherwise. A list is a TOML array in the file and a JSON array in the environment: `AENV_DNS='["9.9.9.9"]'`.

```toml
# {DEFAULT_CONFIG_FILE}
home = "/srv/aenv"
default_memory = 1024
max_sandboxes = 64
always_allow = ["10.0.0.2/32"]
dns = ["10.0.0.2"]
```

Settings are read once, when the server starts.
"""


def bounds(field: FieldInfo) -> str:
    """The allowed range in words, or an empty text."""
    signs = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
    parts = []
    for entry in field.metadata:
        for kind, sign in signs.items():
            if isinstance(entry, kind):
                parts.append(f"{sign} {getattr(entry, kind.__name__.lower())}")
        if pattern := getattr(entry, "pattern", None):
            parts.append(f"matches `{pattern}`")
    return ", ".join(parts)


def type_name(annotation: Any) -> str:
    """The type as a reader of TOML knows it."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is list:
        return "list of texts"
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    members = [member for member in get_args(annotation) if member is not type(None)]
    if members:
        return type_name(members[0])
    return {int: "integer", float: "number", str: "text", Path: "path", bool: "boolean"}.get(annotation, "value")


def entry_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of the entries of a table such as ``dict[str, Model]``, or of the table itself."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return field.annotation
    if get_origin(field.annotation) is not dict:
        return None
    kind = get_args(field.annotation)[1]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def default_text(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "as below"
    if value is None:
        return "unset"
    return f"`{json.dumps(value if isinstance(value, (list, dict, int, float)) else str(value))}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def row(name: str, field: FieldInfo) -> str:
    kind = "; ".join(filter(None, (type_name(field.annotation), bounds(field))))
    meaning = field.description or name.replace("_", " ").capitalize()
    return f"| `{name}` | {cell(kind)} | {cell(default_text(field))} | {cell(meaning)} |"


def settings_tables() -> str:
    """One table for each section; the keys of a table's entries follow the section they belong to."""
    columns = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    lines: list[str] = []
    entries: list[str] = []
    for name, field in Settings.model_fields.items():
        if name in SECTIONS:
            lines += [*entries, "", f"## {SECTIONS[name]}", "", *columns]
            entries = []
        lines.append(row(name, field))
        if model := entry_model(field):
            own = field.annotation is model
            what = (
                f"The table `{name}`, in TOML `[{name}]`:"
                if own
                else f'An entry of `{name}`, in TOML `[{name}."KEY"]`:'
            )
            entries += ["", what, "", *columns]
            entries += [row(key, inner) for key, inner in model.model_fields.items()]
    return "\n".join(lines + entries)


def command_line() -> str:
    root = typer.main.get_command(cli)
    context = typer.Context(root)
    lines = ["## Command line", "", f"`aenv-server [options]`: {root.help}".rstrip()]
    lines += ["", "| option | meaning |", "|---|---|"]
    for parameter in root.params:
        lines.append(f"| `{', '.join(parameter.opts)}` | {cell(getattr(parameter, 'help', None) or '')} |")
    for name in root.list_commands(context):  # type: ignore[attr-defined]
        command = root.get_command(context, name)  # type: ignore[attr-defined]
        options = ", ".join(f"`{option}`" for parameter in command.params for option in parameter.opts)
        lines += ["", f"`aenv-server {name}`: {command.help} Options: {options}."]
    return "\n".join(lines)


def render() -> str:
    return "\n".join([HEAD.rstrip(), settings_tables(), "", command_line(), ""])


def main() -> None:
    text = render()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != text:
            sys.exit(f"{TARGET} is not up to date: run scripts/config_reference.py")
        return
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
