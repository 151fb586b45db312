"""Coverage-guided fuzzing of the readers of foreign bytes: layers, ZFiles, qcow2 tables.

``python -m tests.storage.fuzz_formats CORPUS [libFuzzer options]``; ``test_fuzz.py`` runs it for a bounded number of
inputs. An input is one byte that picks the reader, then the file. Anything but CorruptFileError is a finding; so is
memory out of proportion to the input, or a reader that hangs (``-rss_limit_mb``, ``-timeout``).
"""

import struct
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["aenv.storage"]):
    from aenv.errors import CorruptFileError
    from aenv.storage import qcow2_map
    from aenv.storage.stack import Stack, open_layer
    from aenv.storage.zfile import SPACE, ZFileSource, checksum

from aenv.storage.qcow2 import encode_overlay
from tests.storage import spec
from tests.storage.sources import Bytes

LIMIT = 1 << 20  # bytes that are read of a virtual disk, whatever it claims


def repair(blob: bytes) -> bytes:
    """A ZFile with right checksums of headers and index: the fuzzer would hardly ever find them."""
    out = bytearray(blob)
    if len(out) >= 2 * SPACE:
        trailer = len(out) - SPACE
        offset, entries = struct.unpack_from("<QQ", out, trailer + 40)
        struct.pack_into("<I", out, trailer + 64, checksum(bytes(out[offset : offset + entries * 4])))
        for start in (0, trailer):
            struct.pack_into("<I", out, start + 28, 0)
            struct.pack_into("<I", out, start + 28, checksum(bytes(out[start : start + SPACE])))
    return bytes(out)


def read_stack(blobs: list[bytes]) -> None:
    stack = Stack([open_layer(Bytes(blob)) for blob in blobs])
    length = min(stack.size, LIMIT)
    assert len(stack.read(0, length)) == length
    middle = stack.size // 2
    assert sum(part.length for part in stack.segments(middle, stack.size - middle)) == stack.size - middle


def read_zfile(blob: bytes) -> None:
    file = ZFileSource(Bytes(blob))
    length = min(file.size, LIMIT)
    assert len(file.read(0, length)) == length
    assert len(file.read(file.size // 2, min(1, file.size - file.size // 2))) <= 1


def read_qcow2(blob: bytes) -> None:
    size, runs = qcow2_map.allocated(Bytes(blob))
    data = runs.pick(runs.layer >= 0)
    assert not len(runs) or (runs.start[0] >= 0 and runs.end[-1] <= size)
    assert (runs.start[1:] >= runs.end[:-1]).all()
    # A cluster counts once, so what is held is within the file but for the end of its last cluster.
    assert int((data.end - data.start).sum()) <= len(blob) + (1 << qcow2_map.MAX_CLUSTER_BITS)


def one(data: bytes) -> None:
    if not data:
        return
    blob = data[1:]
    try:
        match data[0] % 4:
            case 0:
                read_stack([blob])
            case 1:
                read_stack([blob[: len(blob) // 2], blob[len(blob) // 2 :]])
            case 2:
                read_zfile(repair(blob))
            case 3:
                read_qcow2(blob)
    except CorruptFileError:
        pass


def seed(folder: Path) -> None:
    """A few whole files to begin with."""
    layer = spec.write_layer(
        [spec.Piece(0, 8, bytes(4096)), spec.Piece(9, 3, None), spec.Piece(12, 1, b"x" * 512)], 8192
    )
    overlay = bytearray(encode_overlay(1 << 20, "/base", "raw") + bytes(65536 * 3))
    struct.pack_into(">Q", overlay, 3 * 65536, 4 * 65536)  # L1: an L2 table
    struct.pack_into(">QQQ", overlay, 4 * 65536, 5 * 65536, 1, 0)  # L2: data, zeros, a hole
    files = {
        "layer": b"\0" + layer,
        "layers": b"\1" + layer + layer,
        "lz4": b"\2" + spec.write_zfile(layer, "lz4", 4096, checksums=False),
        "zstd": b"\2" + spec.write_zfile(layer, "zstd", 4096, checksums=True),
        "compressed-layer": b"\0" + spec.write_zfile(layer, "lz4", 4096, checksums=False),
        "qcow2": b"\3" + bytes(overlay),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    seed(Path(sys.argv[1]))
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
