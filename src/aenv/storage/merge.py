"""Merging the layers of a disk's chain into one, so that opening the disk stays quick."""

import asyncio
import shutil
import uuid
from pathlib import Path

from aenv.errors import CorruptFileError
from aenv.storage.lsmt import disk_errors
from aenv.storage.qcow2 import backing_chain


async def merge_layers(top: Path, base: Path, base_format: str, out: Path) -> None:
    """Write to ``out`` one qcow2 overlay over ``base`` with the contents of ``top`` and all layers between the two.

    All of them must be frozen, and ``base`` in the backing chain of ``top``. A copy of the top layer is rebased,
    which reads only what the layers in between hold. (``qemu-img convert -B`` takes what the top layer alone does not
    have from ``base``: it loses the layers between.) ``out`` appears by rename. Raises CorruptFileError,
    CapacityError.

    Headers name what is read here with all rights, and a VMM that a guest had taken over may have written them: they
    must not lead out of the folders of ``top`` and ``base``.
    """
    chain = await asyncio.to_thread(backing_chain, top)
    if base not in chain or any(path.parent not in (top.parent, base.parent) for path in chain):
        raise CorruptFileError(f"{top} is not a chain of layers over {base}.")
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        with disk_errors(out):
            await _run("cp", "--sparse=always", "--reflink=auto", str(top), str(temporary))
            await _run("qemu-img", "rebase", "-f", "qcow2", "-b", str(base), "-F", base_format, str(temporary))
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


async def _run(*argv: str) -> None:
    program = shutil.which(argv[0]) or argv[0]
    process = await asyncio.create_subprocess_exec(
        program, *argv[1:],
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        _, stderr = await process.communicate()
    except BaseException:
        process.kill()
        await asyncio.shield(process.wait())
        raise
    if process.returncode != 0:
        raise CorruptFileError(f"Disk layers cannot be merged: {stderr.decode(errors='replace').strip()}")
