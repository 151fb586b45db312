"""One snapshot as one file: a tar with the manifest and then each of its layers, verified by their digests.

Members, in this order: ``snapshot.json`` (the sealed manifest, ``aenv.snapshot.manifest``), ``layers/<sha256>`` once
for each blob. When no layer is compressed already the tar is within a zstd frame. An import finds out by itself.
"""

import errno
import hashlib
import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from aenv.errors import CapacityError, CorruptFileError, SourceError
from aenv.snapshot.manifest import MAX_BYTES, LayerRef, Manifest, digest_hex, dump, load
from aenv.snapshot.repository import Progress
from aenv.snapshot.shared import SharedRepository
from aenv.storage.zfile import is_zfile

_CHUNK = 1 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # RFC 8878, 3.1.1
_LEVEL = 3  # of zstd: its default
_MANIFEST = "snapshot.json"


def blobs(manifest: Manifest) -> list[LayerRef]:
    """What it names, each once."""
    return list({layer.digest: layer for layer in manifest.layers()}.values())


def export_snapshot(
    repository: SharedRepository, manifest: Manifest, out: IO[bytes], progress: Progress | None = None
) -> None:
    """Write the archive of a snapshot whose layers are claimed. ``progress`` counts stored bytes.

    Raises CorruptFileError when a layer is damaged: what was written until then is no archive.
    """
    refs = blobs(manifest)
    if any(_is_compressed(repository, ref) for ref in refs):
        _write(repository, manifest, refs, out, progress)
        return
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=-1, write_checksum=True)
    with compressor.stream_writer(out, closefd=False) as compressed:
        _write(repository, manifest, refs, cast(IO[bytes], compressed), progress)


def import_snapshot(
    repository: SharedRepository,
    source: IO[bytes],
    owner: str,
    progress: Progress | None = None,
    *,
    spool: Path | None = None,
    repair: bool = False,
) -> Manifest:
    """Store the snapshot of an archive, and commit it when all of it is there and whole.

    Layers go through unnamed files in ``spool`` (default: where temporary files go), one at a time. With ``repair``
    layers are written anew also where the repository has them: over damaged ones. Raises CorruptFileError for what is
    not a whole archive, ConflictError when another snapshot has the id; nothing is visible then.
    """
    with _reading(source) as tar:
        manifest = _read_manifest(tar)
        missing = {digest_hex(ref.digest): ref for ref in blobs(manifest)}
        total = sum(ref.size for ref in missing.values())
        done = 0
        with repository.claim(manifest.digests(), owner) as claim:
            for member in _members(tar):
                folder, _, name = member.name.rpartition("/")
                ref = missing.pop(name, None) if folder == "layers" else None
                if ref is None or not member.isreg() or member.size != ref.size:
                    raise CorruptFileError(
                        f"The archive has an entry that its snapshot does not name: {member.name[:99]!r}."
                    )
                _store(repository, tar, member, ref, spool, repair)
                done += ref.size
                if progress:
                    progress(done, total)
            if missing:
                raise CorruptFileError(f"The archive lacks {len(missing)} layers of its snapshot: it is not whole.")
            repository.commit(manifest, claim=claim)
    return manifest


@contextmanager
def _reading(source: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """The tar of an archive that is read once, from its beginning to its end; it may be a pipe."""
    head = source.read(len(_ZSTD_MAGIC))
    plain = cast(IO[bytes], io.BufferedReader(_Prefixed(head, source), _CHUNK))
    try:
        if head == _ZSTD_MAGIC:
            plain = cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(plain))
        with tarfile.open(fileobj=plain, mode="r|", bufsize=_CHUNK) as tar:
            yield tar
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise CorruptFileError(f"This is no archive of a snapshot, or not all of one: {error}.") from error


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        yield member


def _read_manifest(tar: tarfile.TarFile) -> Manifest:
    member = tar.next()
    file = tar.extractfile(member) if member and member.isreg() and member.name == _MANIFEST else None
    if member is None or file is None or member.size > MAX_BYTES:
        raise CorruptFileError(
            f"The archive does not begin with {_MANIFEST}.", "aenv-store export writes such archives."
        )
    return load(file.read(), _MANIFEST)


def _store(
    repository: SharedRepository,
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    ref: LayerRef,
    spool: Path | None,
    repair: bool,
) -> None:
    """Verify a member, and put it into the repository unless it is there."""
    content = tar.extractfile(member)
    assert content is not None, "a regular file"
    known = not repair and repository.has_layer(ref.digest)
    try:
        # The file has no name, so nothing is left of it when this process is killed.
        with tempfile.TemporaryFile(dir=spool, buffering=0) as file:
            digest = hashlib.sha256()
            while block := content.read(_CHUNK):
                digest.update(block)
                if not known:
                    view = memoryview(block)
                    while view:
                        view = view[file.write(view) :]
            if f"sha256:{digest.hexdigest()}" != ref.digest:
                raise CorruptFileError(f"The layer {ref.digest} is damaged in the archive.")
            if not known:
                repository.put_layer(Path(f"/proc/self/fd/{file.fileno()}"), ref.digest, replace=repair)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"There is no room for a layer of {ref.size} bytes in {spool or tempfile.gettempdir()}.",
                "Name a folder with --spool.",
            ) from error
        raise SourceError(f"The archive cannot be read: {error.strerror}.") from error


class _Prefixed(io.RawIOBase):
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


class _Blocks:
    """What ``tarfile`` reads a member from: blocks of any size, each shown to ``seen`` as it passes."""

    def __init__(self, blocks: Iterator[bytes], seen: Callable[[bytes], None]) -> None:
        self._blocks = blocks
        self._seen = seen
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        parts = []
        while size:
            if not self._rest:
                block = next(self._blocks, b"")
                if not block:
                    break
                self._seen(block)
                self._rest = memoryview(block)
            parts.append(bytes(self._rest[:size]))
            self._rest = self._rest[size:]
            size -= len(parts[-1])
        return b"".join(parts)


def _is_compressed(repository: SharedRepository, ref: LayerRef) -> bool:
    source = repository.open_layer(ref)
    try:
        return is_zfile(source)
    finally:
        source.close()


def _write(
    repository: SharedRepository,
    manifest: Manifest,
    refs: list[LayerRef],
    out: IO[bytes],
    progress: Progress | None,
) -> None:
    total, done = sum(ref.size for ref in refs), 0

    def add(tar: tarfile.TarFile, name: str, size: int, content: IO[bytes]) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime, entry.mode = size, int(manifest.created_at.timestamp()), 0o600
        tar.addfile(entry, content)

    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as tar:
        document = dump(manifest)
        add(tar, _MANIFEST, len(document), io.BytesIO(document))
        for ref in refs:
            digest = hashlib.sha256()

            def step(block: bytes, digest: "hashlib._Hash" = digest) -> None:
                nonlocal done
                digest.update(block)
                done += len(block)
                if progress:
                    progress(done, total)

            add(
                tar,
                f"layers/{digest_hex(ref.digest)}",
                ref.size,
                cast(IO[bytes], _Blocks(repository.stream(ref), step)),
            )
            if f"sha256:{digest.hexdigest()}" != ref.digest:
                raise CorruptFileError(
                    f"The layer {ref.digest} is damaged in the repository.", "See aenv-store verify."
                )
