"""Build steps as the SDK sends them, checked and typed. Pure.

The arguments' meaning is the SDK's (e2b 2.63, ``template/main.py``): COPY ``src, dest, user[:group], mode``; ENV
``name, value, …``; RUN ``command[, user]``; WORKDIR ``path``; USER ``name``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from aenv.errors import InvalidRequestError

MAX_STEPS = 1000
MAX_ARGUMENT = 128 * 1024 - 1  # bytes: what exec takes of one argument (MAX_ARG_STRLEN, execve(2))
_HASH = re.compile(r"[0-9a-f]{64}")
_MODE = re.compile(r"0?[0-7]{3,4}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")


@dataclass(frozen=True, slots=True)
class Run:
    command: str
    user: str | None


@dataclass(frozen=True, slots=True)
class Copy:
    """``files`` is the digest under which the archive was uploaded; ``mode`` is octal text, empty to keep modes."""

    source: str
    destination: str
    owner: str  # user or user:group; empty: the user of the step
    mode: str
    files: str


@dataclass(frozen=True, slots=True)
class Env:
    variables: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Workdir:
    path: str


@dataclass(frozen=True, slots=True)
class User:
    name: str


Action = Run | Copy | Env | Workdir | User


@dataclass(frozen=True, slots=True)
class Step:
    """``force``: run it and what follows even if the result is cached."""

    number: int  # from 1, as the SDK counts them
    action: Action
    force: bool = False

    @property
    def label(self) -> str:
        """One line for the log."""
        match self.action:
            case Run(command, user):
                text = f"RUN {command}" + (f" (as {user})" if user else "")
            case Copy(source, destination):
                text = f"COPY {source} {destination}"
            case Env(variables):
                text = "ENV " + " ".join(name for name, _ in variables)
            case Workdir(path):
                text = f"WORKDIR {path}"
            case User(name):
                text = f"USER {name}"
        line = text.replace("\n", " ")
        return line if len(line) <= 200 else line[:199] + "…"


@dataclass(frozen=True, slots=True)
class RawStep:
    """One element of ``steps`` as it came."""

    type: str
    args: Sequence[str] = ()
    files_hash: str | None = None
    force: bool = False


def check_hash(text: str) -> str:
    """Raises InvalidRequestError unless ``text`` is a SHA-256 digest, as the SDK sends for a COPY step's files."""
    if not _HASH.fullmatch(text):
        raise InvalidRequestError(f"{text[:80]!r} is not a SHA-256 digest of files.")
    return text


def parse(raw: Sequence[RawStep]) -> tuple[Step, ...]:
    """Raises InvalidRequestError that names the first wrong step."""
    if len(raw) > MAX_STEPS:
        raise InvalidRequestError(f"A build of {len(raw)} steps is too long.", f"Use at most {MAX_STEPS}.")
    steps = []
    for number, step in enumerate(raw, 1):
        try:
            steps.append(Step(number, _action(step), step.force))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"Step {number} ({step.type[:20]}): {error.message}", error.hint) from None
    return tuple(steps)


def _action(raw: RawStep) -> Action:
    args = list(raw.args)
    for text in args:
        if "\0" in text or len(text.encode(errors="surrogateescape")) > MAX_ARGUMENT:
            raise InvalidRequestError("an argument has a zero byte or is larger than 128 KiB.")
    match raw.type.upper(), args:
        case "RUN", [command, *rest] if command.strip() and len(rest) <= 1:
            return Run(command, rest[0] if rest and rest[0] else None)
        case "COPY", [source, destination, *rest] if len(rest) <= 2:
            return _copy(source, destination, (*rest, "", "")[0], (*rest, "", "")[1], raw.files_hash)
        case "ENV", [_, *_] if len(args) % 2 == 0:
            return _env(args)
        case "WORKDIR", [path] if path:
            return Workdir(path)
        case "USER", [name] if _OWNER.fullmatch(name):
            return User(name.partition(":")[0])
        case (("RUN" | "COPY" | "ENV" | "WORKDIR" | "USER"), _):
            raise InvalidRequestError(f"wrong arguments: {args!r:.200}.")
        case _:
            raise InvalidRequestError("unknown type.", "Use COPY, ENV, RUN, USER or WORKDIR.")


def _copy(source: str, destination: str, owner: str, mode: str, files: str | None) -> Copy:
    if not source or not destination:
        raise InvalidRequestError("source and destination are needed.")
    if source.startswith("/") or ".." in source.split("/"):
        raise InvalidRequestError(f"{source!r} leaves the build context.", "Use a path relative to it.")
    if owner and not _OWNER.fullmatch(owner):
        raise InvalidRequestError(f"{owner!r} is not user or user:group.")
    if mode and not _MODE.fullmatch(mode):
        raise InvalidRequestError(f"{mode!r} is not an octal file mode.")
    if files is None:
        raise InvalidRequestError("filesHash is missing.", "It is the digest that the files were uploaded under.")
    return Copy(source, destination, owner, mode, check_hash(files))


def _env(args: Sequence[str]) -> Env:
    pairs = tuple(zip(args[::2], args[1::2], strict=True))
    for name, _ in pairs:
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"{name!r} cannot be the name of an environment variable.")
    return Env(pairs)
