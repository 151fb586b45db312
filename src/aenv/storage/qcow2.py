"""Just enough of qcow2 (QEMU's ``docs/interop/qcow2.txt``) to create an empty overlay and to read a header.

``qemu-img create`` takes about 10 ms, mostly to start; a fork needs one overlay per child, so they are written here.
"""

import os
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import CorruptFileError
from aenv.storage.lsmt import disk_errors

MAGIC = b"QFI\xfb"
HEADER = struct.Struct(">4sIQIIQIIQQIIQ QQQII")  # version 3, 104 bytes
CLUSTER_BITS = 16
CLUSTER = 1 << CLUSTER_BITS
EXTENSION_BACKING_FORMAT = 0xE2792ACA
MAX_BACKING_NAME = 1023  # bytes, a limit of the format
MAX_CHAIN = 255
EXTERNAL_DATA = 1 << 2  # of the incompatible features
_L1_ENTRY_COVERS = CLUSTER * (CLUSTER // 8)  # bytes of disk per L1 entry: 512 MiB


@dataclass(frozen=True, slots=True)
class Header:
    """What the node needs of a qcow2 header. ``size`` is the virtual size in bytes."""

    version: int
    size: int
    backing: Path | None
    backing_format: str | None


def encode_overlay(size: int, backing: str, backing_format: str) -> bytes:
    """An empty version 3 image of ``size`` bytes over ``backing`` (absolute path)."""
    name = backing.encode()
    if len(name) > MAX_BACKING_NAME:
        raise ValueError(f"Backing file name is longer than {MAX_BACKING_NAME} bytes: {backing}.")
    l1_entries = max(1, -(-size // _L1_ENTRY_COVERS))
    l1_clusters = -(-l1_entries * 8 // CLUSTER)
    # Clusters: 0 header, 1 refcount table, 2 refcount block, 3… L1 table. One block counts 32768 clusters.
    clusters = 3 + l1_clusters
    form = backing_format.encode()
    extension = struct.pack(">II", EXTENSION_BACKING_FORMAT, len(form)) + form.ljust(-(-len(form) // 8) * 8, b"\0")
    extensions = extension + bytes(8)  # the end marker
    header = HEADER.pack(
        MAGIC, 3, HEADER.size + len(extensions), len(name), CLUSTER_BITS, size, 0, l1_entries,
        3 * CLUSTER, CLUSTER, 1, 0, 0, 0, 0, 0, 4, HEADER.size,
    )  # fmt: skip
    out = bytearray(3 * CLUSTER)
    blob = header + extensions + name
    out[: len(blob)] = blob
    struct.pack_into(">Q", out, CLUSTER, 2 * CLUSTER)
    struct.pack_into(f">{clusters}H", out, 2 * CLUSTER, *([1] * clusters))
    return bytes(out)  # the L1 table is all zero: the file is extended over it


def create_overlay(path: Path, backing: Path, size: int | None = None, form: str = "qcow2") -> None:
    """Create an empty overlay at ``path``, which must not exist, over ``backing``, which is of format ``form``.

    The format is told and never guessed: a guest can make its raw disk look like an image that names a file of the
    host. ``size`` is bytes, by default the backing image's. Raises CapacityError, CorruptFileError, FileExistsError.
    """
    if form not in ("qcow2", "raw"):
        raise ValueError(f"A backing of format {form!r} is not possible.")
    if size is None:
        size = read_header(backing).size if form == "qcow2" else backing.stat().st_size
    size = -(-size // 512) * 512
    blob = encode_overlay(size, str(backing.absolute()), form)
    l1_bytes = max(1, -(-size // _L1_ENTRY_COVERS)) * 8
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with disk_errors(path):
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                # Only the bytes that are not zero: an idle overlay occupies three blocks.
                os.ftruncate(fd, len(blob) + -(-l1_bytes // CLUSTER) * CLUSTER)
                for at in range(0, len(blob), CLUSTER):
                    os.pwrite(fd, blob[at : at + CLUSTER].rstrip(b"\0"), at)
            finally:
                os.close(fd)
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def parse_header(data: bytes, path: Path) -> Header:
    """Header of the image that starts with ``data`` (at least its first cluster). Raises CorruptFileError."""

    def bad(why: str) -> CorruptFileError:
        return CorruptFileError(f"{path} is not a usable qcow2 image: {why}.")

    if len(data) < 72 or data[:4] != MAGIC:
        raise bad("wrong magic")
    version, name_at, name_size, cluster_bits, size = struct.unpack_from(">IQIIQ", data, 4)
    if version not in (2, 3):
        raise bad(f"version {version}")
    if not 9 <= cluster_bits <= 21:
        raise bad(f"cluster size 2^{cluster_bits}")
    header_size = 72
    if version == 3:
        if len(data) < HEADER.size:
            raise bad("cut off")
        if struct.unpack_from(">Q", data, 72)[0] & EXTERNAL_DATA:
            raise bad("it keeps its data in another file")
        (header_size,) = struct.unpack_from(">I", data, 100)
        if header_size < HEADER.size:
            raise bad("header is too short")
    backing: Path | None = None
    if name_at:
        if name_size > MAX_BACKING_NAME or name_at + name_size > min(len(data), 1 << cluster_bits):
            raise bad("the backing file's name is outside the header")
        try:
            text = data[name_at : name_at + name_size].decode()
        except UnicodeDecodeError as error:
            raise bad("the backing file's name is not text") from error
        if not text or "\0" in text:
            raise bad("the backing file's name is empty or has a NUL")
        backing = path.absolute().parent / text
    form = None
    at = header_size
    end = name_at or min(len(data), 1 << cluster_bits)
    while at + 8 <= min(end, len(data)):
        kind, length = struct.unpack_from(">II", data, at)
        if kind == 0:
            break
        if at + 8 + length > min(end, len(data)):
            raise bad("a header extension is outside the header")
        if kind == EXTENSION_BACKING_FORMAT:
            form = data[at + 8 : at + 8 + length].decode("ascii", "replace")
        at += 8 + -(-length // 8) * 8
    return Header(version, size, backing, form)


def read_header(path: Path) -> Header:
    """Raises CorruptFileError when ``path`` is not a qcow2 image."""
    with path.open("rb") as file:
        return parse_header(file.read(CLUSTER), path)


def backing_chain(path: Path) -> list[Path]:
    """A qcow2 image and every file under it, top first. Raises CorruptFileError on a loop or a missing file."""
    chain = [path.absolute()]
    try:
        form: str | None = "qcow2"
        while form == "qcow2":
            header = read_header(chain[-1])
            if header.backing is None:
                break
            if header.backing in chain or len(chain) >= MAX_CHAIN:
                raise CorruptFileError(f"The backing chain of {path} loops or is deeper than {MAX_CHAIN}.")
            chain.append(header.backing)
            form = header.backing_format
            if not header.backing.exists():
                raise FileNotFoundError(header.backing)
    except FileNotFoundError as error:
        raise CorruptFileError(f"{chain[-1]}, which {path} is based on, is missing.") from error
    return chain
