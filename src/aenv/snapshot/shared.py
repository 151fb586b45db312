"""The repository over an object store: what commits, names and claims mean, whatever keeps the objects.

Keys: ``layers/<2 hex>/<sha256>``, ``snapshots/<id>.json``, ``names/<2 hex>.json`` (``aenv.snapshot.catalog``),
``claims/<owner>/<uuid>.json`` and ``tombs/<uuid>.json`` (``aenv.snapshot.claims``), ``clock``, ``probe/<uuid>``.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from aenv.errors import (
    CapacityError,
    ConflictError,
    CorruptFileError,
    InvalidRequestError,
    NotFoundError,
    SnapshotNotFoundError,
    SourceError,
)
from aenv.snapshot.catalog import Catalog
from aenv.snapshot.claims import Renewal, StoredClaim
from aenv.snapshot.clock import Clock
from aenv.snapshot.collector import Collector, layer_key
from aenv.snapshot.index import ManifestIndex, manifest_key
from aenv.snapshot.manifest import LayerRef, Manifest, check_id, digest_hex, dump
from aenv.snapshot.objects import (
    MAX_DELETE,
    ObjectMissingError,
    ObjectStore,
    OpenObject,
    PreconditionError,
    in_parallel,
)
from aenv.snapshot.repository import ANY, Anything, Claim, GcReport, NameEntry, Progress, Usage, VerifyReport
from aenv.snapshot.verify import Inspector

_CHUNK = 8 << 20  # bytes of one read of a whole layer


class SharedRepository:
    """``Repository``."""

    def __init__(self, store: ObjectStore, clock: Clock = Clock()) -> None:  # noqa: B008 - a frozen value
        self.store = store
        self._clock = clock
        self._index = ManifestIndex(store)
        self._catalog = Catalog(store, clock)
        self._renewal = Renewal()

    # --- Layers ------------------------------------------------------------------------------------------------

    def has_layer(self, digest: str) -> bool:
        digest_hex(digest)
        return self.store.head(layer_key(digest)) is not None

    def put_layer(
        self, path: Path, digest: str | None = None, progress: Progress | None = None, *, replace: bool = False
    ) -> LayerRef:
        size = path.stat().st_size
        if digest is None:
            digest = file_digest(path)
        digest_hex(digest)
        ref = LayerRef(digest, size)
        found = None if replace else self.store.head(layer_key(digest))
        if found is None or found.size != size:
            done = 0

            def step(count: int) -> None:
                nonlocal done
                done += count
                if progress:
                    progress(done, size)

            self.store.put_file(layer_key(digest), path, digest_hex(digest), step)
        elif progress:
            progress(size, size)
        return ref

    def open_layer(self, ref: LayerRef) -> OpenObject:
        return self.store.open(layer_key(ref.digest), ref.size)

    def fetch(self, ref: LayerRef, path: Path, progress: Progress | None = None) -> None:
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                digest = hashlib.sha256()
                done = 0
                for data in self.stream(ref):
                    digest.update(data)
                    file.write(data)
                    done += len(data)
                    if progress:
                        progress(done, ref.size)
                file.flush()
                os.fsync(file.fileno())
            if f"sha256:{digest.hexdigest()}" != ref.digest:
                raise self._damaged(ref)
            part.replace(path)
        except OSError as error:
            raise CapacityError(
                f"{path} cannot be written: {error.strerror}.", "Make room, or choose another place."
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def check_layer(self, ref: LayerRef) -> None:
        if not self.has_layer(ref.digest):
            raise NotFoundError(f"The layer {ref.digest} is not in {self.store.describe()}.")
        digest = hashlib.sha256()
        for data in self.stream(ref):
            digest.update(data)
        if f"sha256:{digest.hexdigest()}" != ref.digest:
            raise self._damaged(ref)

    def _damaged(self, ref: LayerRef) -> CorruptFileError:
        return CorruptFileError(
            f"The layer {ref.digest} in {self.store.describe()} is damaged: its bytes have another digest.",
            "Store it anew from a copy: aenv-store import --repair.",
        )

    def stream(self, ref: LayerRef) -> Iterator[bytes]:
        """All bytes of a layer, in order, several reads ahead where that pays. Nothing is verified."""
        source = self.open_layer(ref)
        ranges = [(start, min(_CHUNK, ref.size - start)) for start in range(0, ref.size, _CHUNK)]
        ahead = min(self.store.parallel, 4)
        try:
            if ahead == 1:
                for start, length in ranges:
                    yield source.read(start, length)
                return
            with ThreadPoolExecutor(ahead) as pool:
                pending = [pool.submit(source.read, *part) for part in ranges[:ahead]]
                for part in [*ranges[ahead:], *[None] * len(pending)]:
                    yield pending.pop(0).result()
                    if part is not None:
                        pending.append(pool.submit(source.read, *part))
        finally:
            source.close()

    # --- Snapshots ---------------------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, *, claim: Claim) -> None:
        if missing := manifest.digests() - claim.digests:
            raise ConflictError(f"The claim does not cover {len(missing)} layers of snapshot {manifest.id}.")
        data = dump(manifest)
        stored = _stored(claim)
        if not stored.trusted:
            claim.renew()
        lapses = stored.lapses
        self._require_layers(manifest)
        try:
            self.store.put(manifest_key(manifest.id), data, if_absent=True)
        except PreconditionError:
            if not self._is_committed(manifest):
                raise ConflictError(
                    f"Another snapshot has the id {manifest.id}.", "Choose a new id; a snapshot is never changed."
                ) from None
        if not stored.trusted or stored.lapses != lapses:
            # The process was held up for hours. The manifest protects from now on; was it soon enough?
            claim.renew()
            try:
                self._require_layers(manifest)
            except NotFoundError:
                self.store.delete(manifest_key(manifest.id))
                raise

    def get(self, snapshot_id: str) -> Manifest:
        try:
            return self._index.get(check_id(snapshot_id))
        except (ObjectMissingError, InvalidRequestError):
            raise SnapshotNotFoundError(snapshot_id) from None

    def list(self) -> Iterator[Manifest]:
        manifests, _ = self._index.scan()
        return iter(sorted(manifests, key=lambda manifest: (manifest.created_at, manifest.id), reverse=True))

    def delete(self, snapshot_id: str) -> None:
        self._require_snapshot(snapshot_id)
        self._catalog.remove_all(lambda named: named == snapshot_id)
        self.store.delete(manifest_key(snapshot_id))
        # Once more: somebody may have named it in between, and has seen it still there.
        self._catalog.remove_all(lambda named: named == snapshot_id)

    # --- Names -------------------------------------------------------------------------------------------------

    def set_name(self, name: str, tag: str, snapshot_id: str, *, expected: str | Anything | None = ANY) -> None:
        self._require_snapshot(snapshot_id)
        self._catalog.set(name, tag, snapshot_id, expected)
        # Whoever deletes the snapshot takes its names away first; this one may have come after that.
        if self.store.head(manifest_key(snapshot_id)) is None:
            with contextlib.suppress(SnapshotNotFoundError, ConflictError):
                self._catalog.remove(name, tag, snapshot_id)
            raise SnapshotNotFoundError(snapshot_id)

    def resolve(self, name: str, tag: str) -> str:
        return self._catalog.resolve(name, tag)

    def names(self) -> Iterator[NameEntry]:
        return iter(sorted(self._catalog.entries(), key=lambda entry: (entry.name, entry.tag)))

    def delete_name(self, name: str, tag: str, *, expected: str | Anything = ANY) -> None:
        self._catalog.remove(name, tag, expected)

    # --- Keeping and removing ----------------------------------------------------------------------------------

    def claim(self, digests: Iterable[str], owner: str) -> Claim:
        claim = StoredClaim(self.store, owner, self._clock, self._renewal.remove)
        self._renewal.add(claim)
        try:
            claim.add(digests)
        except BaseException:
            claim.release()
            raise
        return claim

    def acquire(self, snapshot_id: str, owner: str) -> tuple[Manifest, Claim]:
        manifest = self.get(snapshot_id)
        claim = self.claim(manifest.digests(), owner)
        try:
            # It was there after the claim, so nobody who could delete its layers has missed both.
            if self.get(snapshot_id).digests() != manifest.digests():
                raise SourceError(f"Snapshot {snapshot_id} was replaced while it was opened.", "Try again.")
        except BaseException:
            claim.release()
            raise
        return manifest, claim

    def drop_claims(self, owner: str) -> int:
        listed = [info.key for info in self.store.list(f"claims/{owner}/")]
        held = self._renewal.keys()  # looked at later: a claim of ours is on that list before it is stored
        keys = [key for key in listed if key not in held]
        for start in range(0, len(keys), MAX_DELETE):
            self.store.delete(*keys[start : start + MAX_DELETE])
        return len(keys)

    def gc(self, grace: timedelta) -> GcReport:
        return Collector(self.store, self._index, self._catalog, self._clock).run(grace)

    def verify(self, progress: Progress | None = None, *, deep: bool = True) -> VerifyReport:
        return Inspector(self.store, self._index, self._catalog).verify(progress, deep)

    def usage(self) -> Usage:
        return Inspector(self.store, self._index, self._catalog).usage()

    def close(self) -> None:
        self._renewal.close()

    def _require_snapshot(self, snapshot_id: str) -> None:
        """Whether its manifest is there; not whether it can be read."""
        try:
            found = self.store.head(manifest_key(check_id(snapshot_id)))
        except InvalidRequestError:
            found = None
        if found is None:
            raise SnapshotNotFoundError(snapshot_id)

    def _require_layers(self, manifest: Manifest) -> None:
        """Raises NotFoundError unless each is there, CorruptFileError when one has another size."""
        layers = list({layer.digest: layer for layer in manifest.layers()}.values())
        found = in_parallel(self.store.parallel, lambda layer: self.store.head(layer_key(layer.digest)), layers)
        for layer, info in zip(layers, found, strict=True):
            if info is None:
                raise NotFoundError(
                    f"Snapshot {manifest.id} names the layer {layer.digest}, which is not in the repository.",
                    "Store it (put_layer) under the claim, then commit again.",
                )
            if info.size != layer.size:
                raise CorruptFileError(f"The layer {layer.digest} has {info.size} bytes and not {layer.size}.")

    def _is_committed(self, manifest: Manifest) -> bool:
        try:
            return self._index.get(manifest.id).same_content(manifest)
        except ObjectMissingError:
            raise SourceError(f"Snapshot {manifest.id} was deleted while it was committed.", "Try again.") from None


def file_digest(path: Path) -> str:
    """``sha256:<hex>`` of a file."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _stored(claim: Claim) -> StoredClaim:
    assert isinstance(claim, StoredClaim), "a claim of this repository"
    return claim
