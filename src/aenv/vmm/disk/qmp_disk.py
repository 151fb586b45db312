"""What is done to a disk while it is written to, over QMP: the same commands for QEMU and qemu-storage-daemon.

The writable node has a name that begins with ``ROOT_NODE``; which node that is now is asked each time, so that
nothing needs to be remembered over a crash of the server.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from aenv.errors import VmmError
from aenv.storage import qcow2
from aenv.vmm import qemu_command
from aenv.vmm.qmp import QmpClient, QmpCommandError

FindRoot = Callable[[], Awaitable[tuple[str, Path]]]
Show = Callable[[Path, bool], Awaitable[None]]


class QmpDisk:
    """Operations on the root disk of one process that speaks QMP. Its guest may run."""

    def __init__(self, qmp: QmpClient, root: FindRoot, owner: str, show: Show | None = None) -> None:
        """``root`` finds name and file of the writable node; ``owner`` is who is spoken of in errors.

        ``show`` lets the process get at a file that it is about to open, to be written or not.
        """
        self._qmp = qmp
        self._find_root = root
        self._owner = owner
        self._show = show

    async def path(self) -> Path:
        """The file that writes go to now."""
        return (await self._find_root())[1]

    async def rebase(self, overlay: Path) -> None:
        """Freeze the present file and continue on a new overlay, which is removed again if that fails."""
        node, current = await self._find_root()
        number = node.rpartition("-")[2]
        fresh = f"{qemu_command.ROOT_NODE}-{int(number) + 1 if number.isdigit() else 1}"
        await asyncio.to_thread(qcow2.create_overlay, overlay, current)
        try:
            if self._show is not None:
                await self._show(overlay, True)
            # backing null: the running node becomes the backing, not a second open of the same file.
            add = self._qmp.send("blockdev-add", qemu_command.disk_node(overlay, fresh, "qcow2", backing=None))
            swap = self._qmp.send("blockdev-snapshot", {"node": node, "overlay": fresh})
            await self._qmp.result(add, "blockdev-add")
            await self._qmp.result(swap, "blockdev-snapshot")
        except VmmError:
            with contextlib.suppress(VmmError):
                await self._qmp.execute("blockdev-del", {"node-name": fresh})
            await asyncio.to_thread(overlay.unlink, True)
            raise

    async def replace_backing(self, backing: Path) -> None:
        """Read from ``backing`` what the disk's file does not hold; then name it in the file's header."""
        node, current = await self._find_root()
        nodes = await self._qmp.execute("query-named-block-nodes", {"flat": True})
        names = [n["node-name"] for n in nodes if n["drv"] == "file" and n["file"] == str(current)]
        if len(names) != 1:
            raise VmmError(f"{self._owner} has {len(names)} nodes for its root disk {current}.")
        fresh = f"{qemu_command.BACKING_NODE}-{uuid.uuid4().hex[:8]}"
        if self._show is not None:
            await self._show(backing, False)
        await self._qmp.execute("blockdev-add", qemu_command.backing_node(backing, fresh))
        try:
            options = qemu_command.disk_node(current, node, "qcow2", file=names[0], backing=fresh)
            await self._qmp.execute("blockdev-reopen", {"options": [options]})
        except VmmError:
            with contextlib.suppress(VmmError):
                await self._qmp.execute("blockdev-del", {"node-name": fresh})
            raise
        await self._drop_nodes({n["node-name"] for n in nodes if qemu_command.is_ours(n["node-name"])} - {node})
        arguments = {"device": node, "image-node-name": node, "backing-file": str(backing)}
        await self._qmp.execute("change-backing-file", arguments)

    async def grow(self, size: int) -> None:
        """Make the disk ``size`` bytes large. QEMU would also make it smaller, and lose what was behind the end."""
        node, _ = await self._find_root()
        nodes = await self._qmp.execute("query-named-block-nodes", {"flat": True})
        present = next(n["image"]["virtual-size"] for n in nodes if n["node-name"] == node)
        if size < present:
            raise VmmError(f"{self._owner} has {present} bytes and cannot shrink to {size}.")
        await self._qmp.execute("block_resize", {"node-name": node, "size": size})

    async def _drop_nodes(self, names: set[str]) -> None:
        """Close what is no longer in use. A node that was added by name stays open until told, with all below."""
        dropped = True
        while names and dropped:
            dropped = False
            for name in sorted(names):
                with contextlib.suppress(QmpCommandError):
                    await self._qmp.execute("blockdev-del", {"node-name": name})
                    names.discard(name)
                    dropped = True
