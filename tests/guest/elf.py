"""Small 64-bit ELF files for tests: as much of the format as the code under test reads."""

import struct


def with_note(owner: bytes, kind: int, *, banner: bytes = b"") -> bytes:
    """An executable with one PT_NOTE segment; ``banner`` is appended."""
    name = owner + b"\x00"
    note = struct.pack("<III", len(name), 4, kind) + name + b"\x00" * (-len(name) % 4) + b"desc"
    program = struct.pack("<IIQQQQQQ", 4, 0, 64 + 56, 0, 0, len(note), len(note), 4)
    return _header(program_at=64, programs=1) + program + note + banner


def module(modinfo: dict[str, str]) -> bytes:
    """A module with a ``.modinfo`` section."""
    info = b"".join(f"{key}={value}".encode() + b"\x00" for key, value in modinfo.items())
    names = b"\x00.modinfo\x00.shstrtab\x00"
    info_at, names_at = 64, 64 + len(info)
    table = struct.pack("<IIQQQQIIQQ", *[0] * 10)
    table += struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, info_at, len(info), 0, 0, 1, 0)
    table += struct.pack("<IIQQQQIIQQ", 10, 3, 0, 0, names_at, len(names), 0, 0, 1, 0)
    return _header(section_at=names_at + len(names), sections=3, names=2) + info + names + table


def _header(
    *, program_at: int = 0, programs: int = 0, section_at: int = 0, sections: int = 0, names: int = 0
) -> bytes:
    ident = b"\x7fELF\x02\x01\x01" + b"\x00" * 9
    return ident + struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, 0, program_at, section_at, 0, 64, 56, programs, 64, sections, names
    )
