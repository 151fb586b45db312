"""What a layer server is started with. One JSON document, so that its keeper needs nothing else to start."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

VERSION = 1  # of the control protocol and of this document


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes are bytes. ``cache`` of None: no blocks are kept on disk."""

    runtime: Path
    cache: Path | None
    cache_size: int
    memory_size: int  # of blocks in the server's own memory
    reserve: int  # bytes kept free on the disk of the cache

    @property
    def mount(self) -> Path:
        return self.runtime / "layers"

    @property
    def socket(self) -> Path:
        return self.runtime / "layerd.sock"

    @property
    def lock(self) -> Path:
        """Held (flock) while a keeper or a server lives."""
        return self.runtime / "layerd.lock"

    @property
    def exports(self) -> Path:
        return self.runtime / "layerd-exports.json"

    @property
    def log(self) -> Path:
        return self.runtime / "layerd.log"

    def dump(self) -> str:
        return json.dumps({key: str(v) if isinstance(v, Path) else v for key, v in asdict(self).items()})

    @classmethod
    def load(cls, text: str) -> "Config":
        value = json.loads(text)
        cache = Path(value.pop("cache")) if value["cache"] else value.pop("cache")
        return cls(runtime=Path(value.pop("runtime")), cache=cache, **value)
