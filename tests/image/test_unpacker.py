"""The process that unpacks, where it is not what it should be."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from aenv.image import unpacker
from aenv.image.errors import ImageError
from aenv.image.unpacker import Unpacker, Unpackers

CHATTY = "import sys\nfor line in sys.stdin:\n    print('x' * (2 << 20), flush=True)"


async def test_an_answer_without_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[asyncio.subprocess.Process]()

    async def start() -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        started.append(
            await asyncio.create_subprocess_exec(sys.executable, "-c", CHATTY, stdin=pipe, stdout=pipe, limit=1 << 20)
        )
        return started[0]

    monkeypatch.setattr(unpacker, "_start", start)
    async with asyncio.timeout(30):
        with pytest.raises(ImageError, match="process that unpacks"):
            async with Unpacker(Unpackers(), 64, tmp_path, 0, print) as unpacking:
                await unpacking.format()
    assert started[0].returncode is not None
