"""Which files of a build context ``.dockerignore`` excludes. Pure.

The rules are Docker's (docs.docker.com/build/concepts/context, ".dockerignore files"): patterns are relative to the
context, ``**`` stands for any number of folders, what is below an excluded folder is excluded, ``!`` takes back, and
the last pattern that matches decides.
"""

import posixpath
import re
from collections.abc import Iterable

from aenv.errors import InvalidRequestError


class Ignore:
    def __init__(self, lines: Iterable[str]) -> None:
        """Raises InvalidRequestError for a pattern that cannot be one."""
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        for line in lines:
            pattern = line.strip()
            if not pattern or line.startswith("#"):
                continue
            excludes = not pattern.startswith("!")
            pattern = posixpath.normpath(pattern.lstrip("!").strip()).lstrip("/")
            if pattern in ("", "."):
                continue
            self._rules.append((_compile(pattern), excludes))
        self.has_exceptions = any(not excludes for _, excludes in self._rules)

    def excludes(self, path: str) -> bool:
        """``path`` is relative to the context, with ``/`` between its parts."""
        parts = path.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        verdict = False
        for expression, excludes in self._rules:
            if verdict != excludes and any(expression.fullmatch(name) for name in above):
                verdict = excludes
        return verdict


def _compile(pattern: str) -> re.Pattern[str]:
    out, index = "", 0
    while index < len(pattern):
        letter = pattern[index]
        index += 1
        if letter == "*":
            if pattern[index : index + 1] == "*":
                index += 1
                if pattern[index : index + 1] == "/":
                    index += 1
                    out += "(?:.*/)?"
                else:
                    out += ".*"
            else:
                out += "[^/]*"
        elif letter == "?":
            out += "[^/]"
        elif letter == "[":
            end = pattern.find("]", index + 1)
            if end < 0:
                raise InvalidRequestError(f".dockerignore: {pattern!r} is not a pattern: a [ is not closed.")
            body = pattern[index:end].replace("\\", "\\\\").replace("[", "\\[")
            out += f"[{body}]"
            index = end + 1
        elif letter == "\\" and index < len(pattern):
            out += re.escape(pattern[index])
            index += 1
        else:
            out += re.escape(letter)
    try:
        return re.compile(out, re.DOTALL)
    except re.error as error:
        raise InvalidRequestError(f".dockerignore: {pattern!r} is not a pattern: {error}.") from None
