"""Which members of an uploaded archive a COPY step's source names. Pure.

The SDK packs what its glob matched, with names relative to the build context and with everything below matched
folders; the pattern itself comes with the step. ``*``, ``?`` and ``[…]`` stay within one path component, ``**``
stands for any number of them, and names that start with a dot are matched, as the SDK does (wcmatch with GLOBSTAR
and DOTMATCH).
"""

import posixpath
import re
from collections.abc import Iterable

from aenv.errors import InvalidRequestError


def has_magic(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


def normalise(path: str) -> str:
    """A path relative to the context, ``.`` for the context itself."""
    return posixpath.normpath(path)


def _component(pattern: str) -> str:
    """The regular expression of one path component, by the rules of glob(7)."""
    out, at = "", 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == "*":
            out += "[^/]*"
        elif character == "?":
            out += "[^/]"
        elif character == "[" and (end := pattern.find("]", at + 1 + (pattern[at : at + 1] in "!^"))) >= 0:
            body, at = pattern[at:end], end + 1
            negated = body[:1] in ("!", "^")
            members = body[negated:].replace("\\", r"\\").replace("[", r"\[").replace("]", r"\]").replace("^", r"\^")
            out += f"[{'^/' if negated else ''}{members}]"
        else:
            out += re.escape(character)
    return out


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Raises InvalidRequestError for a bracket expression that cannot be one."""
    parts = normalise(pattern).split("/")
    expression = ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            expression += "(?:[^/]+/)*" + ("[^/]+" if last else "")
        else:
            expression += _component(part) + ("" if last else "/")
    try:
        return re.compile(expression + r"\Z", re.DOTALL)
    except re.error as error:
        raise InvalidRequestError(f"{pattern!r} is not a pattern: {error}.") from None


def matches(pattern: str, names: Iterable[str]) -> list[str]:
    """The outermost members that ``pattern`` matches, sorted: what is below a matched folder is part of it."""
    compiled = compile_pattern(pattern)
    found: list[str] = []
    for name in sorted({normalise(name) for name in names}, key=lambda name: name.split("/")):
        if found and name.startswith(found[-1] + "/"):
            continue
        if compiled.match(name):
            found.append(name)
    return found
