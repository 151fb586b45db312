"""The Firecracker binary: which release it is, and whether this driver knows that release."""

import asyncio
import os
import re
import shutil
from dataclasses import dataclass

from aenv.errors import VmmError

# The two newest stable releases: API and format of snapshots were read and tried for these. What else is relied on:
# ``docs/internals/firecracker.md``.
SUPPORTED = ((1, 15), (1, 16))
TIMEOUT = 10.0  # seconds; some ms on an idle host


@dataclass(frozen=True, slots=True)
class FirecrackerBinary:
    """``identity`` changes when the binary is replaced; ``snapshot_version`` is that of its format of snapshots."""

    path: str
    version: str
    snapshot_version: str
    identity: str


async def find_firecracker(name: str) -> FirecrackerBinary:
    """The binary and its version. Raises VmmError when it is missing, broken or of a release not supported."""
    releases = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    advice = f"Install Firecracker {releases} (aenv-server setup --firecracker does), or set AENV_FIRECRACKER."
    path = shutil.which(name)
    if path is None:
        raise VmmError(f"Firecracker ({name}) is not installed.", advice)
    version = parse_version(await _ask(path, "--version", advice))
    snapshot_version = parse_version(await _ask(path, "--snapshot-version", advice))
    if version is None or snapshot_version is None:
        raise VmmError(f"{path} --version does not name a version.", advice)
    if version[:2] not in SUPPORTED:
        raise VmmError(f"{path} is version {'.'.join(map(str, version))}, which is not supported.", advice)
    stat = await asyncio.to_thread(os.stat, path)
    first, second = (".".join(map(str, numbers)) for numbers in (version, snapshot_version))
    return FirecrackerBinary(path, first, second, f"{path}:{stat.st_size}:{stat.st_mtime_ns}")


def parse_version(output: str) -> tuple[int, int, int] | None:
    """The version on the first line ("Firecracker v1.16.1", "v10.0.0"); lines of its log follow."""
    found = re.match(r"(?:Firecracker )?v(\d+)\.(\d+)\.(\d+)\b", output)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


async def _ask(path: str, option: str, advice: str) -> str:
    try:
        child = await asyncio.create_subprocess_exec(
            path, option, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise VmmError(f"{path} cannot be run: {error}.", advice) from error
    try:
        async with asyncio.timeout(TIMEOUT):
            output, _ = await child.communicate()
    except TimeoutError as error:
        child.kill()
        await child.wait()
        raise VmmError(f"{path} {option} does not end.", advice) from error
    return output.decode(errors="replace")
