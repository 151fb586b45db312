"""Expansion of ``$NAME`` in the values of ENV and WORKDIR steps. Pure.

The rules are those of Dockerfiles (docs.docker.com/reference/dockerfile, "Environment replacement"): ``$NAME``,
``${NAME}``, ``${NAME:-word}``, ``${NAME:+word}``; a backslash makes the next character ordinary; a name that is not
set is empty. What is not one of these forms stays as it is.
"""

import re
from collections.abc import Mapping

# A name's end, and the two modifiers; the word of a modifier may itself contain simple references.
_REFERENCE = re.compile(
    r"\\(?P<escaped>[\\$])"
    r"|\$(?P<plain>[A-Za-z_][A-Za-z0-9_]*)"
    r"|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<modifier>[-+])(?P<word>[^{}]*))?\}"
)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with its references replaced from ``variables``."""

    def value(match: re.Match[str]) -> str:
        if (escaped := match["escaped"]) is not None:
            return escaped
        found = variables.get(match["plain"] or match["name"], "")
        if match["modifier"] == "-":
            return found or expand(match["word"], variables)
        if match["modifier"] == "+":
            return expand(match["word"], variables) if found else ""
        return found

    return _REFERENCE.sub(value, text)
