"""The user's terminal while a program in a sandbox owns it: raw mode, size, input and output, a lost connection.

Output is copied by a thread, input by the main thread, where signals arrive. Whatever happens, the terminal is as
before when this is left.
"""

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from aenv.client.connect import Ended, Output, Started
from aenv.client.sandbox import ProcessInput, ProcessStream, SandboxClient, Size
from aenv.client.transport import ApiError, UnreachableError
from aenv.errors import AenvError

RECONNECT = 120.0  # seconds of trying to get back to a running program
PAUSE = 0.5  # seconds between two attempts
INTERRUPT = b"\x03"  # Ctrl-C in raw mode
# What a full-screen program that was cut off may have left on: the alternate screen, a hidden cursor, bracketed
# paste, application keys, mouse reports, attributes. https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
RESET = b"\033[?1049l\033[?25h\033[?2004l\033[?1l\033>\033[?1000l\033[?1002l\033[?1003l\033[?1006l\033[0m\r\n"
# Terminal types that small images know; others are called what they are compatible with.
KNOWN_TERMS = ("xterm", "xterm-256color", "linux", "vt100", "screen", "screen-256color", "tmux-256color", "dumb")


class LostError(AenvError):
    """The connection to a program in a sandbox broke, and the program could not be reached again."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Why the stream of output ended without the program's end."""

    reason: AenvError


def size() -> Size:
    """Columns and rows of the terminal."""
    with suppress(OSError):
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8)))
        if rows and columns:
            return columns, rows
    return 80, 24


def environment() -> dict[str, str]:
    """Variables that tell a program in the sandbox what the terminal is."""
    term = os.environ.get("TERM", "")
    found = {"TERM": term if term in KNOWN_TERMS else "xterm-256color", "LANG": "C.UTF-8"}
    if colours := os.environ.get("COLORTERM"):
        found["COLORTERM"] = colours
    return found


@contextmanager
def raw(descriptor: int) -> Iterator[None]:
    """Pass every key on as it is, Ctrl-C and Ctrl-D included, until the block is left."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)  # what was typed ahead is not thrown away
        yield
    finally:
        with suppress(termios.error):  # it has been closed
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Terminal:
    """Connects the user's terminal to one program on a pseudo-terminal in a sandbox."""

    def __init__(
        self,
        client: SandboxClient,
        start: Callable[[Size], ProcessStream],
        why_lost: Callable[[int], AenvError | None],
    ) -> None:
        """``start`` opens the stream; ``why_lost`` (given the program's pid) tells why it cannot be reached any more,
        None while there is hope."""
        self._client = client
        self._start = start
        self._why_lost = why_lost
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._resized = False
        self._ended: Ended | Lost | None = None
        self._pid = 0
        self._started = threading.Event()
        self._input: ProcessInput | None = None
        self._typed = b""  # while the connection was lost

    def run(self, *, redraw: bool = False) -> Ended:
        """Until the program ends. ``redraw``: it runs already, and has a screen to draw for this terminal.

        Raises CommandRefusedError if it cannot be started or is not there, LostError.
        """
        stdin = sys.stdin.fileno()
        stream = self._start(size())
        previous = signal.signal(signal.SIGWINCH, self._on_resize)
        try:
            with raw(stdin):
                ended = self._follow(stream, stdin, redraw=redraw)
                while isinstance(ended, Lost):
                    if self._pid == 0:  # it never started
                        raise ended.reason
                    self._tell("\r\naenv: the connection was lost; trying to get back, Ctrl-C gives up ...")
                    ended = self._follow(self._again(ended, stdin), stdin, redraw=True)
                return ended
        finally:
            signal.signal(signal.SIGWINCH, previous)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _follow(self, stream: ProcessStream, stdin: int, *, redraw: bool) -> Ended | Lost:
        """Copy both ways until the stream ends."""
        self._ended = None
        self._started.clear()
        copier = threading.Thread(target=self._copy_output, args=(stream,), daemon=True)
        copier.start()
        try:
            if redraw:
                self._redraw()
                self._send(self._typed)
                self._typed = b""
            self._copy_input(stdin)
        finally:
            stream.close()
            if self._input is not None:
                self._input.abort()
                self._input = None
        assert self._ended is not None
        return self._ended

    def _copy_output(self, stream: ProcessStream) -> None:
        outcome: Ended | Lost = Lost(UnreachableError("The connection broke off."))
        try:
            for event in stream:
                if isinstance(event, Output):
                    _write_all(sys.stdout.fileno(), event.data)
                elif isinstance(event, Started):
                    self._pid = event.pid
                    self._started.set()
                else:
                    outcome = event
        except AenvError as error:
            outcome = Lost(error)
        finally:
            self._ended = outcome
            self._started.set()
            self._wake()

    def _copy_input(self, stdin: int) -> None:
        watched = [stdin, self._wake_read]
        while self._ended is None:
            ready, _, _ = select.select(watched, [], [])
            if self._wake_read in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            if self._resized:
                self._resized = False
                self._resize(size())
            if stdin in ready and self._ended is None:
                data = os.read(stdin, 65536)
                if not data:  # the terminal is gone
                    raise SystemExit(128 + signal.SIGHUP)
                self._send(data)

    def _send(self, data: bytes) -> None:
        """What cannot be sent is dropped; the output's end tells why."""
        if not data:
            return
        self._started.wait()
        try:
            if self._input is None:
                self._input = self._client.input(self._pid, terminal=True)
            self._input.send(data)
        except UnreachableError:
            if self._input is not None:
                self._input.abort()
            self._input = None

    def _resize(self, wanted: Size) -> None:
        self._started.wait()
        with suppress(AenvError):
            self._client.resize(self._pid, wanted)

    def _redraw(self) -> None:
        """A program draws its screen again when its size changes, so change it and change it back."""
        columns, rows = size()
        self._resize((columns, max(1, rows - 1)))
        self._resize((columns, rows))

    def _again(self, lost: Lost, stdin: int) -> ProcessStream:
        """A new stream of the same program. Raises LostError with the terminal in order."""
        try:
            return self._attach(lost.reason, stdin)
        except AenvError:
            _write_all(sys.stdout.fileno(), RESET)
            raise

    def _attach(self, reason: AenvError, stdin: int) -> ProcessStream:
        deadline = time.monotonic() + RECONNECT
        while time.monotonic() < deadline:
            try:
                return self._client.attach(self._pid)
            except AenvError as error:
                reason = error
                if isinstance(error, ApiError) and error.status == 404:
                    raise LostError("The program ended while the connection was lost.") from error
            if (why := self._why_lost(self._pid)) is not None:
                raise why
            if self._gives_up(stdin):
                break
        raise LostError(
            f"The connection was lost: {reason.message}",
            f"The program may still run: `aenv connect {self._client.sandbox_id} --pid {self._pid}` goes back to it.",
        )

    def _gives_up(self, stdin: int) -> bool:
        """Wait before the next attempt. Keys are kept for the program, but for Ctrl-C: it is the user's answer."""
        until = time.monotonic() + PAUSE
        while (left := until - time.monotonic()) > 0:
            if select.select([stdin], [], [], left)[0]:
                data = os.read(stdin, 65536)
                if not data or INTERRUPT in data:
                    return True
                self._typed += data
        return False

    @staticmethod
    def _tell(message: str) -> None:
        os.write(sys.stderr.fileno(), message.encode() + b"\r\n")

    def _on_resize(self, *_: object) -> None:
        self._resized = True
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_write, b"\0")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
