"""A layer server whose layers are far away: a folder of layers, read with the latency and the faults a test asks for.

``python -m tests.layerd.server keep JSON`` is a real layer server but for its source, which is what a test controls.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aenv.errors import SourceError
from aenv.storage.fetching import FetchPolicy
from aenv.storage.layerd.__main__ import main
from aenv.storage.layerd.exports import Layer

MODULE = "tests.layerd.server"


class FarSource:
    """One layer's file. What happens to a read is in ``<folder>/faults.json``, looked at before each:

    latency (seconds), fail (every read fails), fail_first (how many reads fail), hang, short (bytes too few). The key
    ``*`` is for all layers, a digest for one. Each read that reaches the file is a line of ``<folder>/reads``.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder, self._digest = folder, digest
        self._fd = os.open(folder / digest.removeprefix("sha256:"), os.O_RDONLY)
        self._log = os.open(folder / "reads", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._lock = threading.Lock()
        self._failed = 0

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        faults = json.loads((self._folder / "faults.json").read_text())
        fault = {**faults.get("*", {}), **faults.get(self._digest, {})}
        time.sleep(fault.get("latency", 0))
        with self._lock:
            self._failed += 1
            failed = self._failed
        if fault.get("fail") or failed <= fault.get("fail_first", 0):
            raise SourceError("The test says no.")
        while fault.get("hang"):
            time.sleep(0.05)
            faults = json.loads((self._folder / "faults.json").read_text())
            fault = {**faults.get("*", {}), **faults.get(self._digest, {})}
        os.write(self._log, f"{self._digest} {offset} {length}\n".encode())
        return os.pread(self._fd, length - fault.get("short", 0), offset)


def opener(repository: Mapping[str, Any], layer: Layer) -> FarSource:
    return FarSource(Path(repository["path"]), layer.digest)


if __name__ == "__main__":
    main(
        MODULE,
        opener,
        FetchPolicy(attempts=3, first_wait=0.02, deadline=float(os.environ.get("FETCH_DEADLINE", "2"))),
    )
