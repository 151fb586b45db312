"""All manifests of a repository, each read once: a listing tells which of them are new."""

import re
import threading

from aenv.errors import CorruptFileError
from aenv.snapshot.manifest import Manifest, load
from aenv.snapshot.objects import ObjectInfo, ObjectMissingError, ObjectStore, in_parallel

FOLDER = "snapshots/"
_KEY = re.compile(r"snapshots/[0-9a-f]{8,64}\.json")


def manifest_key(snapshot_id: str) -> str:
    return f"{FOLDER}{snapshot_id}.json"


def is_manifest(key: str) -> bool:
    return _KEY.fullmatch(key) is not None


class ManifestIndex:
    """Keeps what it has read, by key and etag: manifests are never changed, only deleted."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, Manifest]] = {}

    def get(self, snapshot_id: str) -> Manifest:
        """Read anew. Raises ObjectMissingError, CorruptFileError."""
        manifest, info = self._read(manifest_key(snapshot_id))
        with self._lock:
            self._known[info.key] = info.etag, manifest
        return manifest

    def scan(self) -> tuple[list[Manifest], dict[str, CorruptFileError]]:
        """Every manifest there is now, and the keys of those that cannot be read, with why.

        Files that others put beside them (NFS its ``.nfs…`` of what is open and deleted) are none.
        """
        found = [info for info in self._store.list(FOLDER) if is_manifest(info.key)]
        with self._lock:
            known = self._known
        fresh = {info.key: known[info.key] for info in found if info.key in known and known[info.key][0] == info.etag}
        missing = [info for info in found if info.key not in fresh]
        damaged: dict[str, CorruptFileError] = {}

        def read(info: ObjectInfo) -> None:
            try:
                manifest, now = self._read(info.key)
                fresh[info.key] = now.etag, manifest
            except ObjectMissingError:
                pass  # deleted meanwhile
            except CorruptFileError as error:
                damaged[info.key] = error

        in_parallel(self._store.parallel, read, missing)
        with self._lock:
            self._known = fresh
        return [manifest for _, manifest in list(fresh.values())], damaged

    def _read(self, key: str) -> tuple[Manifest, ObjectInfo]:
        data, info = self._store.get(key)
        manifest = load(data, f"{self._store.describe()}/{key}")
        if manifest_key(manifest.id) != key:
            raise CorruptFileError(
                f"{key} holds the manifest of snapshot {manifest.id}.", "A file was moved or copied."
            )
        return manifest, info
