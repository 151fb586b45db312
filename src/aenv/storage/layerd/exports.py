"""Which files the mount has: names, stable inode numbers, and what each is made of. Survives the server in a file."""

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aenv.errors import ConflictError, CorruptFileError, InvalidRequestError, NotFoundError

FIRST_INODE = 2  # 1 is the root
MAX_LAYERS = 255
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Layer:
    digest: str  # "sha256:<hex>" of the stored bytes
    size: int  # stored bytes


@dataclass(frozen=True, slots=True)
class Export:
    """One file. ``repository`` says where its layers are: see ``aenv.storage.layerd.opening``."""

    name: str
    inode: int
    virtual_size: int  # bytes
    layers: tuple[Layer, ...]  # bottom first
    repository: Mapping[str, Any]
    created: int  # seconds since 1970
    sequential: bool = False  # read by read(2): the kernel may read far ahead; else page faults are expected
    removed: bool = False  # has no name any more, and goes when nobody has it open


def parse(value: Mapping[str, Any]) -> tuple[str, int, tuple[Layer, ...], Mapping[str, Any], bool]:
    """What a client asks to export. Raises InvalidRequestError."""
    try:
        name, size, repository = value["name"], value["virtual_size"], value["repository"]
        layers = tuple(Layer(layer["digest"], layer["size"]) for layer in value["layers"])
    except (KeyError, TypeError) as error:
        raise InvalidRequestError(f"An export needs name, virtual_size, layers and repository ({error}).") from None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{str(name)[:80]!r} cannot name an export.", "Use up to 200 letters, digits, dots, dashes, underscores."
        )
    if not isinstance(size, int) or not 0 <= size < 1 << 62 or not isinstance(repository, dict):
        raise InvalidRequestError("An export's virtual_size is a number of bytes and its repository an object.")
    if len(layers) > MAX_LAYERS:
        raise InvalidRequestError(f"{len(layers)} layers are too many.", f"Compact them: {MAX_LAYERS} are allowed.")
    for layer in layers:
        if (
            not isinstance(layer.digest, str)
            or not _DIGEST.fullmatch(layer.digest)
            or not isinstance(layer.size, int)
        ):
            raise InvalidRequestError(f"{str(layer.digest)[:80]!r} is no layer's digest.", "It is sha256:<64 hex>.")
    return name, size, layers, repository, bool(value.get("sequential"))


class Exports:
    """The table, and its file: replaced by one rename before a change is seen by anybody. Thread-safe.

    The file holds the repositories' credentials and is readable by its owner alone. It is not synced: it is of no use
    after the host has died, because the mount is gone then.
    """

    def __init__(self, path: Path) -> None:
        """Raises CorruptFileError for a file that this program did not write."""
        self._path = path
        self._lock = threading.Lock()
        self._by_inode: dict[int, Export] = {}
        self._by_name: dict[str, Export] = {}
        self._next = FIRST_INODE
        try:
            text = path.read_text()
        except FileNotFoundError:
            return
        try:
            value = json.loads(text)
            self._next = value["next"]
            for record in value["exports"]:
                layers = tuple(Layer(**layer) for layer in record.pop("layers"))
                self._put(Export(layers=layers, **record))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(
                f"{path} is no list of exports: {error}.", "Remove it with the runtime folder."
            ) from error

    def add(
        self,
        name: str,
        virtual_size: int,
        layers: tuple[Layer, ...],
        repository: Mapping[str, Any],
        sequential: bool = False,
    ) -> tuple[Export, bool]:
        """The export of this name, and whether it is new. Repositories' settings of an old one are renewed.

        Raises ConflictError when the name has other contents.
        """
        with self._lock:
            old = self._by_name.get(name)
            if old is None:
                export = Export(name, self._next, virtual_size, layers, repository, int(time.time()), sequential)
                self._next += 1
                self._save([*self._by_inode.values(), export])
                self._put(export)
                return export, True
            if (old.virtual_size, old.layers) != (virtual_size, layers):
                raise ConflictError(
                    f"The export {name!r} has other contents.", "Remove it first, or use another name."
                )
            export = replace(old, repository=repository)
            if old.repository != repository:
                self._save([export if e.inode == old.inode else e for e in self._by_inode.values()])
                self._put(export)
            return export, False

    def hide(self, name: str) -> Export:
        """Take away its name; opens that exist go on. Raises NotFoundError."""
        with self._lock:
            old = self._by_name.get(name)
            if old is None:
                raise NotFoundError(f"There is no export {name!r}.", "List them with aenv-layerd's list.")
            export = replace(old, removed=True)
            self._save([export if e.inode == old.inode else e for e in self._by_inode.values()])
            del self._by_name[name]
            self._by_inode[export.inode] = export
            return export

    def drop(self, inode: int) -> None:
        """Forget one that was hidden."""
        with self._lock:
            if inode in self._by_inode:
                self._save([e for e in self._by_inode.values() if e.inode != inode])
                export = self._by_inode.pop(inode)
                if self._by_name.get(export.name) is export:
                    del self._by_name[export.name]

    def by_name(self, name: str) -> Export | None:
        return self._by_name.get(name)

    def by_inode(self, inode: int) -> Export | None:
        return self._by_inode.get(inode)

    def all(self) -> list[Export]:
        """In the order of their inodes."""
        with self._lock:
            return sorted(self._by_inode.values(), key=lambda e: e.inode)

    def _put(self, export: Export) -> None:
        self._by_inode[export.inode] = export
        if not export.removed:
            self._by_name[export.name] = export

    def _save(self, exports: list[Export]) -> None:
        temporary = self._path.with_name(f".{self._path.name}")
        data = json.dumps({"next": self._next, "exports": [asdict(e) for e in exports]})
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(data)
        temporary.replace(self._path)
