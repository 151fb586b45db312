"""When what a template runs is ready: commands that succeed then. Pure."""

import re

_PORT_CHECK = re.compile(r"grep -qs ':([0-9A-F]{4}) \[0-9A-F\]\*:0000 0A' /proc/net/tcp /proc/net/tcp6")


def port_check(port: int) -> str:
    """A command that succeeds when something listens at a TCP port. It needs nothing but grep.

    State 0A of /proc/net/tcp is LISTEN; addresses are hexadecimal, see proc_net_tcp in the kernel's documentation.
    """
    return f"grep -qs ':{port:04X} [0-9A-F]*:0000 0A' /proc/net/tcp /proc/net/tcp6"


def readable(message: str) -> str:
    """A line of a build's log with ``port_check`` in words."""
    return _PORT_CHECK.sub(lambda match: f"port {int(match[1], 16)} is open", message)
