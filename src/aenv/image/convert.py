"""An image's layers become layers of a disk, one each: what other images have made of the same ones is used.

A step is the next layer of the chain, or what the platform adds at the end. Each is looked up, and made with its lock
held where nobody has made it: of two pulls of images that begin alike one does the work, and the other waits for it.
A step is in the cache when it is complete; what was begun of it is in a folder that goes with this object.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from aenv.config import Settings
from aenv.image import chain
from aenv.image.drives import DriveImage
from aenv.image.errors import ImageError
from aenv.image.layerstore import Hold, LayerStore, StoredLayer
from aenv.image.locks import locked
from aenv.image.manifest import ImageConfig
from aenv.image.unpacker import Unpacker, Unpackers
from aenv.image.workspace import workspace

Progress = Callable[[str], None]
Step = Callable[[Unpacker], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """A layer as its image has it. ``id``: see ``chain.layer_id``; ``diff_id``: of the uncompressed bytes."""

    id: str
    diff_id: str | None
    whiteouts: bool = True


class Archives(Protocol):
    """Where the archives of an image's layers come from."""

    def start(self, first: int) -> None:
        """Those from number ``first`` on will be needed."""
        ...

    async def apply(self, number: int, unpack: Callable[[Path], Awaitable[None]]) -> None:
        """Call ``unpack`` with the archive of a layer, which stays meanwhile."""
        ...


class Conversion:
    """Use as an asynchronous context manager, around ``run``. Its process starts at once."""

    def __init__(
        self, home: Path, size_mib: int, settings: Settings, progress: Progress, processes: Unpackers
    ) -> None:
        self._home = home
        self._size = size_mib
        self._settings = settings
        self._progress = progress
        self._processes = processes
        self._store = LayerStore(home)
        self._stack = contextlib.AsyncExitStack()
        self._hold = Hold(self._store)
        self._fresh = True  # the process knows no disk yet
        self._shown = False  # its disk is that of ``_hold``
        self.work: Path
        self.unpacker: Unpacker

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.later(self._leave(kind, error, trace))
        self._hold.close()

    async def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _begin(self) -> None:
        """A process that knows no disk yet."""
        self.work = await self._stack.enter_async_context(workspace(self._home))
        unpacker = Unpacker(self._processes, self._size, self.work, self._settings.reserve_disk, self._progress)
        self.unpacker = await self._stack.enter_async_context(unpacker)
        self._fresh, self._shown = True, False

    @property
    def hold(self) -> Hold:
        """The layers of the disk as it is now; as long as this object is not left."""
        return self._hold

    async def run(self, layers: Sequence[SourceLayer], archives: Archives, config: ImageConfig) -> Hold:
        """Make the image's disk, beginning with the first layer: ``hold``.

        Raises ImageError and its kinds, CapacityError, and what ``archives`` raises.
        """
        try:
            return await self._run(layers, archives, config)
        except ImageError as error:
            used = self._hold.layers
            if type(error) is not ImageError or not await asyncio.to_thread(self._store.remove_damaged, used):
                raise
        # The cache was damaged: what is over it goes with it, and is made anew.
        self._progress("converted layers in the cache are damaged; converting them again")
        self._adopt(Hold(self._store))
        return await self._run(layers, archives, config)

    async def _run(self, layers: Sequence[SourceLayer], archives: Archives, config: ImageConfig) -> Hold:
        user, path = config.user, config.env.get("PATH", "")
        steps = chain.steps([layer.id for layer in layers])
        name = steps[-1][0] if steps else ""
        final = chain.prepared_key(name, self._size, user, path)
        if (known := self._store.find(final)) is not None:
            self._adopt(known)
            return self._hold
        first = 0
        for number in range(len(steps), 0, -1):
            if (known := self._store.find(chain.chain_key(steps[number - 1][0], self._size))) is not None:
                self._adopt(known)
                first = number
                break
        count = len(layers)
        begin = steps[first - 1][1].stop if first else 0
        if begin:
            self._progress(f"{begin} of {count} layers are converted already")
        archives.start(begin)
        if not self._hold.layers:
            await self._step(chain.blank_key(self._size), _format)
        for name, numbers in steps[first:]:
            await self._step(chain.chain_key(name, self._size), self._applying(layers, numbers, archives))

        async def prepare(unpacker: Unpacker) -> str:
            self._progress("writing the file system")
            return await unpacker.prepare(user, path)

        await self._step(final, prepare)
        return self._hold

    async def attach(self, drive: DriveImage, layers: Sequence[SourceLayer], archives: Archives) -> None:
        """Add a drive to the disk. Raises what ``run`` raises."""
        steps = chain.steps([layer.id for layer in layers])
        below = self._hold.layers[-1].digest

        async def add(unpacker: Unpacker) -> str:
            self._progress(f"adding {drive.image} at /{drive.path}")
            archives.start(0)
            await unpacker.stage()
            await self._applying(layers, range(len(layers)), archives, staged=True)(unpacker)
            await unpacker.place(drive.path, drive.folder)
            return self._hold.user

        name = steps[-1][0] if steps else ""
        await self._step(chain.attached_key(below, name, self._size, drive.path, drive.folder), add)

    def _applying(
        self, layers: Sequence[SourceLayer], numbers: range, archives: Archives, *, staged: bool = False
    ) -> Step:
        async def apply(unpacker: Unpacker) -> str:
            for number in numbers:
                layer = layers[number]

                async def unpack(archive: Path, layer: SourceLayer = layer, number: int = number) -> None:
                    self._progress(f"unpacking layer {number + 1} of {len(layers)}")
                    await unpacker.apply(archive, diff_id=layer.diff_id, whiteouts=layer.whiteouts, staged=staged)

                await archives.apply(number, unpack)
            return ""

        return apply

    async def _step(self, key: str, work: Step) -> None:
        """Go on to the file system called ``key``, which ``work`` makes of the present one and names a user of."""
        async with locked(self._home / "images" / "locks" / key):
            if (known := self._store.find(key)) is not None:
                self._adopt(known)
                return
            if not self._shown:
                await self._show()
            user = await work(self.unpacker)
            out = self.work / "sealed"
            layer = StoredLayer(*await self.unpacker.seal(out))
            await asyncio.to_thread(self._store.add, self._hold, out, layer)
            self._hold.user = user
            self._store.record(key, self._hold, user)
            self._shown = True

    async def _show(self) -> None:
        """Have a process whose disk is that of ``_hold``. Each knows one disk in its life."""
        if not self._fresh:
            await self._stack.aclose()
            await self._begin()
        self._fresh = False
        if self._hold.layers:
            await self.unpacker.show(self._hold.paths)

    def _adopt(self, hold: Hold) -> None:
        self._hold.close()
        self._hold = hold
        self._shown = False


async def _format(unpacker: Unpacker) -> str:
    await unpacker.format()
    return ""
