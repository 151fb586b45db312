"""Checks a repository, document by document and layer by layer; and adds up what it holds. Changes nothing."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from threading import Lock

from aenv.errors import AenvError, CorruptFileError
from aenv.snapshot.catalog import Catalog
from aenv.snapshot.claims import live_claims, load_digests, store_time
from aenv.snapshot.collector import is_layer, layer_digest, layer_key, stored_layers
from aenv.snapshot.index import FOLDER, ManifestIndex, is_manifest, manifest_key
from aenv.snapshot.manifest import LayerRef
from aenv.snapshot.objects import ObjectMissingError, ObjectStore, in_parallel
from aenv.snapshot.repository import Problem, Progress, Usage, VerifyReport

_CHUNK = 8 << 20


class Inspector:
    def __init__(self, store: ObjectStore, index: ManifestIndex, catalog: Catalog) -> None:
        self._store = store
        self._index = index
        self._catalog = catalog

    def verify(self, progress: Progress | None, deep: bool) -> VerifyReport:
        manifests, damaged = self._index.scan()
        problems = [
            Problem(key, str(error), (key.rpartition("/")[2].removesuffix(".json"),))
            for key, error in damaged.items()
        ]
        users: dict[str, set[str]] = defaultdict(set)  # layer digest: snapshots
        sizes: dict[str, int] = {}
        for manifest in manifests:
            for layer in manifest.layers():
                users[layer.digest].add(manifest.id)
                if sizes.setdefault(layer.digest, layer.size) != layer.size:
                    problems.append(
                        Problem(layer_key(layer.digest), "Snapshots disagree on its size.", (manifest.id,))
                    )
        stored = {layer_digest(info.key): info for info in stored_layers(self._store)}
        for digest in users:
            # A listing may lack a file that was replaced meanwhile; a look at the file itself does not.
            info = stored.get(digest) or self._store.head(layer_key(digest))
            if info is None:
                what = "The layer is missing."
            elif info.size != sizes[digest]:
                what = f"The layer has {info.size} bytes and was stored with {sizes[digest]}."
            else:
                stored[digest] = info
                continue
            stored.pop(digest, None)
            if self._still_named(digest, users):
                problems.append(Problem(layer_key(digest), what, tuple(sorted(users[digest]))))
        refs = [LayerRef(digest, info.size) for digest, info in stored.items()]
        if deep:
            problems += self._hash_all(refs, users, progress)
        names, name_problems = self._names({manifest.id for manifest in manifests})
        problems += name_problems + self._documents("claims/") + self._documents("tombs/") + self._foreign()
        total = sum(ref.size for ref in refs)
        return VerifyReport(len(manifests), len(refs), total, names, deep, tuple(problems))

    def usage(self) -> Usage:
        manifests, _ = self._index.scan()
        named = {digest for manifest in manifests for digest in manifest.digests()}
        now = store_time(self._store)
        claimed = {digest for _, digests in live_claims(self._store, now) for digest in digests}
        layers = list(stored_layers(self._store))
        free = [info for info in layers if layer_digest(info.key) not in named]
        return Usage(
            snapshots=len(manifests),
            layers=len(layers),
            layer_bytes=sum(info.size for info in layers),
            unreferenced_layers=len(free),
            unreferenced_bytes=sum(info.size for info in free),
            claimed_bytes=sum(info.size for info in free if layer_digest(info.key) in claimed),
            virtual_bytes=sum(manifest.virtual_bytes for manifest in manifests),
            stacked_bytes=sum(layer.size for manifest in manifests for layer in manifest.layers()),
        )

    def _still_named(self, digest: str, users: Mapping[str, set[str]]) -> bool:
        """Whether a snapshot that names the layer is there now: it may have been deleted while we looked."""
        return any(self._store.head(manifest_key(snapshot)) is not None for snapshot in users[digest])

    def _hash_all(
        self, refs: list[LayerRef], users: Mapping[str, set[str]], progress: Progress | None
    ) -> list[Problem]:
        total, done, lock = sum(ref.size for ref in refs), 0, Lock()
        problems: list[Problem] = []

        def check(ref: LayerRef) -> None:
            nonlocal done
            digest = hashlib.sha256()
            source = self._store.open(layer_key(ref.digest), ref.size)
            try:
                for offset in range(0, ref.size, _CHUNK):
                    data = source.read(offset, min(_CHUNK, ref.size - offset))
                    digest.update(data)
                    with lock:
                        done += len(data)
                        if progress:
                            progress(done, total)
            except AenvError as error:
                # A layer that a collection removed meanwhile is no loss.
                if self._store.head(layer_key(ref.digest)) is not None or self._still_named(ref.digest, users):
                    problems.append(Problem(layer_key(ref.digest), str(error), tuple(sorted(users[ref.digest]))))
                return
            finally:
                source.close()
            if f"sha256:{digest.hexdigest()}" != ref.digest:
                what = "The layer's bytes do not have its digest."
                problems.append(Problem(layer_key(ref.digest), what, tuple(sorted(users[ref.digest]))))

        in_parallel(max(2, self._store.parallel), check, refs)
        return problems

    def _names(self, alive: set[str]) -> tuple[int, list[Problem]]:
        count = 0
        problems: list[Problem] = []
        damaged: dict[str, CorruptFileError] = {}
        for entry in self._catalog.entries(damaged):
            count += 1
            if entry.snapshot not in alive and not self._is_there(entry.snapshot):
                what = f"The name {entry.name}:{entry.tag} is of no snapshot; a collection removes it."
                problems.append(Problem("names/", what, (entry.snapshot,)))
        return count, problems + [Problem(key, str(error), ()) for key, error in damaged.items()]

    def _is_there(self, snapshot: str) -> bool:
        key = manifest_key(snapshot)
        return is_manifest(key) and self._store.head(key) is not None

    def _foreign(self) -> list[Problem]:
        """Files that no repository makes. Hidden ones are of file systems and tools, and go by themselves."""
        what = "No program of the repository made this file; nothing uses it. Remove it."
        return [
            Problem(info.key, what, ())
            for folder, known in (("layers/", is_layer), (FOLDER, is_manifest))
            for info in self._store.list(folder)
            if not known(info.key) and not info.key.rpartition("/")[2].startswith(".")
        ]

    def _documents(self, prefix: str) -> list[Problem]:
        problems = []
        for info in self._store.list(prefix):
            try:
                load_digests(self._store.get(info.key)[0], info.key)
            except ObjectMissingError:
                continue
            except AenvError as error:
                problems.append(Problem(info.key, str(error), ()))
        return problems
