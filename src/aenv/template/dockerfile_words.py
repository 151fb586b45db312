"""Words of a Dockerfile: quotes, escapes, and variables. Pure.

The rules are Docker's (docs.docker.com/reference/dockerfile, "Environment replacement"). Values that only the build
machine knows, such as ``$PATH`` of the base image, stay references in the form that ``aenv.template.expand`` reads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r"[\\$]")


class WordError(Exception):
    """A word cannot be understood, or names a variable whose value is needed and not known. Its text says which."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What variables stand for. A name that is not ``known`` may be one of the base image's, unless ``closed``: then
    there are no others, and it is empty."""

    known: Mapping[str, str]
    closed: bool = False


def split(text: str, escape: str = "\\") -> list[str]:
    """Words between white space, quotes and escapes left in them."""
    words, current, quote, index = [], "", "", 0
    while index < len(text):
        letter = text[index]
        if letter == escape and quote != "'" and index + 1 < len(text):
            current += text[index : index + 2]
            index += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
            current += letter
        elif letter in "\"'":
            quote = letter
            current += letter
        elif letter.isspace():
            if current:
                words.append(current)
            current = ""
        else:
            current += letter
        index += 1
    if quote:
        raise WordError(f"a {quote} is not closed")
    return [*words, current] if current else words


def literal(word: str, scope: Scope, escape: str = "\\") -> str:
    """The word's value. Raises WordError when it depends on a variable that is not known here."""
    return _Reader(word, scope, escape, keep=False).read()


def template(word: str, scope: Scope, escape: str = "\\") -> str:
    """The word's value for ``aenv.template.expand``: what is not known here stays a reference. Raises WordError."""
    return _Reader(word, scope, escape, keep=True).read()


def protect(text: str) -> str:
    """``text`` so that ``aenv.template.expand`` gives it back."""
    return _SPECIAL.sub(r"\\\g<0>", text)


class _Reader:
    def __init__(self, word: str, scope: Scope, escape: str, *, keep: bool) -> None:
        self._word = word
        self._scope = scope
        self._escape = escape
        self._keep = keep
        self._at = 0

    def read(self, end: str = "") -> str:
        """Up to ``end`` outside of quotes, or all."""
        out = ""
        while self._at < len(self._word):
            letter = self._word[self._at]
            if letter == end:
                return out
            self._at += 1
            if letter == "'":
                out += self._plain(self._until("'"))
            elif letter == '"':
                out += self._double()
            elif letter == self._escape:
                out += self._plain(self._word[self._at : self._at + 1] or letter)
                self._at += 1
            elif letter == "$":
                out += self._variable()
            else:
                out += self._plain(letter)
        if end:
            raise WordError(f"{self._word!r} has a ${{ that is not closed")
        return out

    def _plain(self, text: str) -> str:
        return protect(text) if self._keep else text

    def _until(self, end: str) -> str:
        stop = self._word.find(end, self._at)
        if stop < 0:
            raise WordError(f"a {end} is not closed")
        text, self._at = self._word[self._at : stop], stop + 1
        return text

    def _double(self) -> str:
        out = ""
        while self._at < len(self._word):
            letter = self._word[self._at]
            self._at += 1
            if letter == '"':
                return out
            if letter == self._escape and self._word[self._at : self._at + 1] in ('"', "$", self._escape):
                out += self._plain(self._word[self._at])
                self._at += 1
            elif letter == "$":
                out += self._variable()
            else:
                out += self._plain(letter)
        raise WordError('a " is not closed')

    def _variable(self) -> str:
        braced = self._word[self._at : self._at + 1] == "{"
        match = _NAME.match(self._word, self._at + braced)
        if match is None:
            if braced:
                raise WordError(f"{self._word!r} has a ${{ without the name of a variable")
            return self._plain("$")
        self._at = match.end()
        if not braced:
            return self._value(match[0], "", "")
        operator = re.compile(r":?[-+?]|").match(self._word, self._at)
        assert operator is not None
        self._at = operator.end()
        word = self.read("}") if operator[0] else ""
        if self._word[self._at : self._at + 1] != "}":
            raise WordError(f"${{{match[0]}{self._word[self._at :][:10]} is a replacement that is not supported")
        self._at += 1
        return self._value(match[0], operator[0], word)

    def _value(self, name: str, operator: str, word: str) -> str:
        known = self._scope.known.get(name)
        if known is None and not self._scope.closed:
            return self._reference(name, operator, word)
        is_set = known is not None and (known != "" or not operator.startswith(":"))
        match operator[-1:]:
            case "-":
                return self._plain(known or "") if is_set else word
            case "+":
                return word if is_set else ""
            case "?" if not is_set:
                raise WordError(f"{name} is not set" + (f": {word}" if word else ""))
        return self._plain(known or "")

    def _reference(self, name: str, operator: str, word: str) -> str:
        if not self._keep:
            raise WordError(f"${name} is not known here: it depends on the base image's environment")
        if operator not in ("", ":-", ":+") or "{" in word or "}" in word:
            raise WordError(f"${{{name}{operator}…}} is not supported for a variable of the base image")
        return f"${{{name}{operator}{word}}}"
