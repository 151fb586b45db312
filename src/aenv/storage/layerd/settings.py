"""From the node's configuration to the layer server's."""

from typing import Any

from aenv.config import Settings
from aenv.storage.layerd.config import Config


def config_of(settings: Settings) -> Config:
    return Config(
        runtime=settings.runtime,
        cache=settings.home / "cache" if settings.layer_cache else None,
        cache_size=settings.layer_cache << 20,
        memory_size=settings.layer_memory << 20,
        reserve=settings.reserve_disk << 20,
    )


def from_settings() -> Config:
    """By the configuration file and the environment."""
    values: dict[str, Any] = {}  # nothing on top of them
    return config_of(Settings(**values))
