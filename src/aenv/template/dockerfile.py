"""Dockerfiles as a list of instructions: lines, continuations, comments, flags, here-documents. Pure.

The format is that of https://docs.docker.com/reference/dockerfile/ (BuildKit's frontend). What the instructions mean
is decided in ``aenv.template.dockerfile_plan``.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aenv.errors import InvalidRequestError

_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_NAME = re.compile(r"\s*([A-Za-z]+)(?:\s+|$)")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=((?:\"[^\"]*\"|'[^']*'|\S)*))?(?:\s+|$)")
# A here-document's mark is a word of its own; what is inside of quotes is not looked at.
_HEREDOC = re.compile(
    r"\"(?:\\.|[^\"\\])*\"|'[^']*'|\\."
    r"|(?<!\S)[0-9]*<<(?P<tabs>-?)(?P<quote>[\"']?)(?P<name>[A-Za-z_][A-Za-z0-9_.]*)(?P=quote)(?!\S)"
)
_WITH_HEREDOCS = frozenset({"RUN", "COPY", "ADD"})


class DockerfileError(InvalidRequestError):
    """``line`` (from 1) cannot be understood, or asks for what is not supported."""

    def __init__(self, line: int, message: str, hint: str = "") -> None:
        super().__init__(f"line {line}: {message}", hint)
        self.line = line


@dataclass(frozen=True, slots=True)
class Heredoc:
    """``expand``: variables in it are replaced, for its name was not quoted."""

    name: str
    content: str
    expand: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """``text`` is what follows name and flags, its lines joined; ``source`` is the instruction as one short line."""

    line: int
    name: str  # upper case
    flags: tuple[tuple[str, str | None], ...]
    text: str
    heredocs: tuple[Heredoc, ...] = ()

    @property
    def source(self) -> str:
        flags = [f"--{name}" + ("" if value is None else f"={value}") for name, value in self.flags]
        line = " ".join(" ".join([self.name, *flags, self.text]).split())
        return line if len(line) <= 160 else line[:159] + "…"

    def json(self) -> list[str] | None:
        """The arguments when they are written as a JSON list of texts, else None."""
        if not self.text.lstrip().startswith("["):
            return None
        try:
            found = json.loads(self.text)
        except ValueError:
            return None
        return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else None


@dataclass(frozen=True, slots=True)
class Dockerfile:
    instructions: tuple[Instruction, ...]
    escape: str  # the character that continues lines and makes others ordinary: \ or `


def parse(text: str) -> Dockerfile:
    """Raises DockerfileError."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape, first = _directives(lines)
    return Dockerfile(tuple(_instructions(lines, first, escape)), escape)


def _directives(lines: Sequence[str]) -> tuple[str, int]:
    """The escape character, and the index of the first line that is no directive."""
    escape, seen = "\\", set()
    for index, line in enumerate(lines):
        match = _DIRECTIVE.fullmatch(line.strip())
        name = match[1].lower() if match else ""
        if match is None or name not in ("syntax", "escape", "check") or name in seen:
            return escape, index
        seen.add(name)
        if name == "escape":
            if match[2] not in ("\\", "`"):
                raise DockerfileError(index + 1, f"the escape character cannot be {match[2]!r}.", r"It is \ or `.")
            escape = match[2]
    return escape, len(lines)


def _instructions(lines: Sequence[str], index: int, escape: str) -> Iterator[Instruction]:
    continued = re.compile(rf"(?:^|[^{re.escape(escape)}]){re.escape(escape)}[ \t]*$")
    while index < len(lines):
        if not lines[index].strip() or lines[index].lstrip().startswith("#"):
            index += 1
            continue
        number, joined = index + 1, ""
        while index < len(lines):
            line = lines[index]
            index += 1
            # Comments and empty lines may stand between the lines of one instruction.
            if joined and (not line.strip() or line.lstrip().startswith("#")):
                continue
            if not continued.search(line):
                joined += line
                break
            joined += line.rstrip(" \t")[: -len(escape)]
        instruction = _instruction(number, joined)
        if instruction.name in _WITH_HEREDOCS and instruction.json() is None:
            documents, index = _heredocs(instruction, lines, index)
            instruction = Instruction(number, instruction.name, instruction.flags, instruction.text, documents)
        yield instruction


def _instruction(number: int, joined: str) -> Instruction:
    match = _NAME.match(joined)
    if match is None:
        raise DockerfileError(number, f"{joined.strip()[:60]!r} does not begin with an instruction.")
    rest, flags = joined[match.end() :], []
    while flag := _FLAG.match(rest):
        flags.append((flag[1], flag[2]))
        rest = rest[flag.end() :]
    return Instruction(number, match[1].upper(), tuple(flags), rest.strip())


def heredoc_marks(text: str) -> list[re.Match[str]]:
    """The marks (``<<NAME``) of here-documents in an instruction's text."""
    return [match for match in _HEREDOC.finditer(text) if match["name"]]


def _heredocs(instruction: Instruction, lines: Sequence[str], index: int) -> tuple[tuple[Heredoc, ...], int]:
    """The documents that follow an instruction, and the index of the line after them."""
    found = []
    for mark in heredoc_marks(instruction.text):
        content = []
        while True:
            if index >= len(lines):
                raise DockerfileError(instruction.line, f"the here-document {mark['name']} does not end.",
                                      f"A line with {mark['name']} and nothing else ends it.")  # fmt: skip
            line = lines[index].lstrip("\t") if mark["tabs"] else lines[index]
            index += 1
            if line == mark["name"]:
                break
            content.append(line + "\n")
        found.append(Heredoc(mark["name"], "".join(content), not mark["quote"]))
    return tuple(found), index
