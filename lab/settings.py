"""Where the lab keeps its files and how large its machine is."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""

CHECKOUT = Path("/aenv")
"""Where the checkout and its virtual environment are in the lab."""

GUEST_CACHE = Path("/var/cache/aenv-tests")
"""Where tests look for guest artefacts, in the lab as on any machine (``tests/node/process.py``)."""

FIRECRACKER = Path("/opt/firecracker")
"""Where the programs that ``AENV_FIRECRACKER_BIN`` names go in the lab."""

ENVD = Path("envd/target/x86_64-unknown-linux-gnu/release/envd")

BUILT = (ENVD, Path("blockd/target/x86_64-unknown-linux-gnu/release/aenv-blockd"))
"""What a checkout has built; the lab builds nothing."""


@dataclass(frozen=True, slots=True)
class LabSettings:
    """From ``AENV_LAB_CACHE``, ``_RESULTS``, ``_CPUS``, ``_MEMORY`` (MiB) and ``AENV_FIRECRACKER_BIN``."""

    cache: Path
    results: Path
    cpus: int
    memory_mib: int
    firecracker: Path | None

    @classmethod
    def read(cls) -> "LabSettings":
        get = os.environ.get
        binary = get("AENV_FIRECRACKER_BIN")
        return cls(
            Path(get("AENV_LAB_CACHE") or "/var/cache/aenv-lab"),
            Path(get("AENV_LAB_RESULTS") or ROOT / "lab-results"),
            int(get("AENV_LAB_CPUS") or 2),
            int(get("AENV_LAB_MEMORY") or 8192),
            Path(binary).resolve() if binary else None,
        )

    @property
    def key(self) -> Path:
        """The SSH key that opens every lab made from this cache."""
        return self.cache / "key"

    @property
    def machines(self) -> Path:
        return self.cache / "machines"
