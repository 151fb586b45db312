"""A small OCI image writer: layers from lists of members, and pushes to a registry, for the tests."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import zstandard

from aenv.image.manifest import DOCKER_CONFIG, DOCKER_LIST, DOCKER_MANIFEST, OCI_CONFIG, OCI_INDEX, OCI_MANIFEST

MTIME = 1_700_000_000


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def member(
    name: str,
    data: bytes | None = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    link: str = "",
    mtime: float = MTIME,
    device: tuple[int, int] = (0, 0),
    pax: Mapping[str, str] | None = None,
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.uid, info.gid, info.linkname, info.mtime = kind, mode, uid, gid, link, mtime
    info.devmajor, info.devminor = device
    info.pax_headers = dict(pax or {})
    content = data or b""
    info.size = len(content) if kind == tarfile.REGTYPE else 0
    return info, content


def folder(name: str, mode: int = 0o755, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.DIRTYPE, mode=mode, **more)


def symlink(name: str, target: str, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.SYMTYPE, mode=0o777, link=target, **more)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.LNKTYPE, link=target)


def archive(members: Sequence[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def compress(data: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(data, 1)
    return zstandard.compress(data, 1) if how == "zstd" else data


@dataclass
class Image:
    """Layers as uncompressed archives, from the bottom up."""

    layers: Sequence[bytes]
    config: Mapping[str, Any] = field(default_factory=dict)
    compression: Sequence[str] = ("gzip",)
    docker: bool = False
    architecture: str = "amd64"
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifest: bytes = b""

    def __post_init__(self) -> None:
        described = {
            "os": "linux",
            "architecture": self.architecture,
            "config": dict(self.config),
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in self.layers]},
        }
        config = json.dumps(described).encode()
        entries = []
        for at, layer in enumerate(self.layers):
            how = self.compression[at % len(self.compression)]
            kind = "application/vnd.oci.image.layer.v1.tar" + ("" if how == "none" else f"+{how}")
            if self.docker:
                kind = "application/vnd.docker.image.rootfs.diff.tar.gzip"
            entries.append(self._add(compress(layer, how), kind))
        value = {
            "schemaVersion": 2,
            "mediaType": self.media_type,
            "config": self._add(config, DOCKER_CONFIG if self.docker else OCI_CONFIG),
            "layers": entries,
        }
        self.manifest = json.dumps(value).encode()

    @property
    def media_type(self) -> str:
        return DOCKER_MANIFEST if self.docker else OCI_MANIFEST

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    def _add(self, data: bytes, kind: str) -> dict[str, Any]:
        self.blobs[digest_of(data)] = data
        return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}

    def described(self) -> dict[str, Any]:
        return {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": len(self.manifest),
            "platform": {"os": "linux", "architecture": self.architecture},
        }


def index_of(images: Sequence[Image], docker: bool = False) -> bytes:
    kind = DOCKER_LIST if docker else OCI_INDEX
    return json.dumps(
        {"schemaVersion": 2, "mediaType": kind, "manifests": [image.described() for image in images]}
    ).encode()


def write_layout(image: Image, path: Path, name: str = "latest") -> None:
    """An OCI image layout in a directory."""
    (path / "blobs/sha256").mkdir(parents=True)
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    for digest, data in {**image.blobs, image.digest: image.manifest}.items():
        (path / "blobs/sha256" / digest.removeprefix("sha256:")).write_bytes(data)
    entry = {**image.described(), "annotations": {"org.opencontainers.image.ref.name": name}}
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))


def push(
    base: str,
    repository: str,
    tag: str,
    images: Sequence[Image],
    *,
    index: bool = False,
    docker_list: bool = False,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Push one image, or several under an index, with the distribution protocol."""
    with httpx.Client(base_url=base, headers=headers, trust_env=False, verify=False, timeout=20) as client:
        for image in images:
            for digest, data in image.blobs.items():
                started = client.post(f"/v2/{repository}/blobs/uploads/")
                assert started.status_code == 202, started.text
                done = client.put(
                    started.headers["Location"],
                    params={**dict(httpx.URL(started.headers["Location"]).params), "digest": digest},
                    content=data,
                    headers={"Content-Type": "application/octet-stream"},
                )
                assert done.status_code == 201, done.text
            name = image.digest if index else tag
            _put_manifest(client, repository, name, image.manifest, image.media_type)
        if index:
            kind = DOCKER_LIST if docker_list else OCI_INDEX
            _put_manifest(client, repository, tag, index_of(images, docker_list), kind)


def _put_manifest(client: httpx.Client, repository: str, name: str, data: bytes, kind: str) -> None:
    done = client.put(f"/v2/{repository}/manifests/{name}", content=data, headers={"Content-Type": kind})
    assert done.status_code == 201, done.text
