"""An image for builds on a real node, in a registry of our own: a small distribution from this machine's programs."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.image import registries
from tests.image.writer import Image, archive, folder, member, push
from tests.node.process import NodeProcess

NAME = "team/tiny:1"
PROGRAMS = (
    "sh", "ls", "cat", "mkdir", "chmod", "chown", "cp", "mv", "rm", "ln", "head", "od", "tr", "tar", "gzip", "awk",
    "dirname", "basename", "env", "id", "sync", "sleep", "echo", "printf", "grep", "timeout", "stat", "wc", "touch",
    "true",
)  # fmt: skip


def tiny(env: list[str], **config: object) -> Image:
    """An OCI image with PROGRAMS and the libraries that they need."""
    wanted: dict[str, bytes] = {}
    for program in PROGRAMS:
        path = shutil.which(program)
        assert path is not None
        wanted[f"bin/{program}"] = Path(path).resolve().read_bytes()
        listed = subprocess.run(["ldd", Path(path).resolve()], capture_output=True, text=True).stdout
        for library in re.findall(r"(/\S+)", listed):
            wanted[library.lstrip("/").removeprefix("usr/")] = Path(library).resolve().read_bytes()
    folders = sorted({str(parent) for name in wanted for parent in Path(name).parents if str(parent) != "."})
    layer = archive(
        [*(folder(name) for name in [*folders, "app"]), *(member(n, d, mode=0o755) for n, d in wanted.items())]
    )
    return Image([layer], {"Env": env, **config})


@contextmanager
def private_registry(node: NodeProcess, directory: Path) -> Iterator[str | None]:
    """A registry with basic authentication that has ``NAME``, and that the node may reach without TLS: its host.

    None where no registry is installed.
    """
    if registries.PROGRAM is None:
        yield None
        return
    with registries.running(directory, auth=registries.basic_auth(directory)) as registry:
        token = base64.b64encode(f"{registries.USER}:{registries.PASSWORD}".encode()).decode()
        image = tiny(["PATH=/tools:/bin", "FROM_IMAGE=yes"], WorkingDir="/app")
        name, _, tag = NAME.partition(":")
        push(registry.base, name, tag, [image], headers={"Authorization": f"Basic {token}"})
        node.restart(registries=json.dumps({registry.host: {"plain_http": True}}))
        yield registry.host
