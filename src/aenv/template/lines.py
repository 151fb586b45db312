"""Splitting a program's output into lines for a log. Pure."""

MAX_LINE = 8192  # bytes after which a line is broken


class LineSplitter:
    """Bytes in, complete lines out. A carriage return starts a line anew, as on a terminal."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return [_text(line) for line in lines]

    def end(self) -> list[str]:
        """What is left without a newline."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
