"""What runs in a template when it is finished, and how it is told that it runs. Pure.

The request's own commands come first, then those of the template that it builds on. An image has an ENTRYPOINT and a
CMD, which are run where the request asks for them; they are as Docker combines them.
"""

import shlex
from dataclasses import dataclass

from aenv.image.manifest import ImageConfig
from aenv.template.ready import port_check


@dataclass(frozen=True, slots=True)
class Service:
    """Shell commands; empty for none. ``optional``: nobody but the image asked for it, so that the build goes on
    without it. Many images have a shell for a command, or one that needs to be told more.
    """

    start: str = ""
    ready: str = ""
    optional: bool = False


def of_image(config: ImageConfig, arguments: str, ready: str) -> Service:
    """``arguments`` are shell words for the ENTRYPOINT in place of the CMD; empty: the CMD's.

    It is ready when ``ready`` succeeds, else when the first port of EXPOSE is open, if there is one.
    """
    start = " ".join(filter(None, (shlex.join(config.entrypoint), arguments or shlex.join(config.cmd))))
    if not start:
        return Service("", ready)
    ports = (port.partition("/") for port in config.exposed_ports)
    first = min((int(number) for number, _, kind in ports if kind in ("", "tcp") and number.isdecimal()), default=0)
    check = port_check(first) if 0 < first < 65536 else ""
    return Service(start, ready or check, optional=not arguments and not ready)
