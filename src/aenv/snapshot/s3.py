"""Objects in an S3 bucket, through obstore.

A server is used only after it has shown, on an object of its own, that it honours ``If-None-Match``, ``If-Match`` and
``Range``: without them commits and names are not safe. Bodies are signed, so the server checks them as they arrive.

An upload that a crash interrupts leaves parts that no listing shows. A rule of the bucket should abort incomplete
multipart uploads after some days; S3 has no other way that all servers offer.
"""

import hashlib
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit, urlunsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.exceptions import PreconditionError as RefusedError
from obstore.store import S3Store as Bucket

from aenv.config import RepositorySettings
from aenv.errors import CorruptFileError, InvalidRequestError, SourceError
from aenv.snapshot.credential_process import CredentialProcess
from aenv.snapshot.objects import ObjectInfo, ObjectMissingError, PreconditionError, Step
from aenv.storage.source import check_range

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

DEADLINE = 60.0  # seconds for one request with all its retries; must be well below claims.TOMB_TRUST
_PART = 8 << 20  # bytes of one part of an upload
_MAX_PARTS = 9000  # S3 allows 10,000
_PAUSES = 0.1, 5.0  # seconds before the first repetition, and at most; doubled each time, with jitter

Result = TypeVar("Result")


class S3Store:
    """``ObjectStore`` in a bucket."""

    def __init__(self, settings: RepositorySettings, deadline: float = DEADLINE) -> None:
        """Raises InvalidRequestError for settings that cannot work. Nothing is asked of the server yet."""
        assert settings.bucket and settings.region, "checked by the settings"
        self.parallel = 16
        self._where = f"s3://{settings.bucket}/{settings.prefix}".rstrip("/")
        self._deadline = deadline
        self._checked = False
        self._checking = threading.Lock()
        self._bucket = _bucket(settings, deadline, retries=4)
        self._once = _bucket(settings, deadline / 2, retries=0)

    def describe(self) -> str:
        return self._where

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        def call() -> tuple[bytes, ObjectInfo]:
            result = obstore.get(self._bucket, key)
            return bytes(result.bytes()), _info(key, result.meta)

        return self._call(key, call)

    def open(self, key: str, size: int) -> "S3Source":
        return S3Source(self, key, size)

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Raises CorruptFileError when the object ends before."""
        if not length:
            return b""

        def call() -> bytes:
            return bytes(obstore.get_range(self._bucket, key, start=offset, length=length))

        data = self._call(key, call)
        if len(data) != length:
            raise CorruptFileError(
                f"{self._where}/{key} is shorter than it was stored.", "Check it: aenv-store verify."
            )
        return data

    def head(self, key: str) -> ObjectInfo | None:
        try:
            return self._call(key, lambda: _info(key, obstore.head(self._bucket, key)))
        except ObjectMissingError:
            return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        def call() -> list[ObjectInfo]:
            return [_info(meta["path"], meta) for batch in obstore.list(self._bucket, prefix) for meta in batch]

        return iter(self._call(prefix, call))

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        self._check()
        return self._put(key, data, "create" if if_absent else "overwrite")

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        self._check()
        return self._put(key, data, {"e_tag": etag})

    def refresh(self, key: str, data: bytes) -> None:
        self.put(key, data)

    def put_file(self, key: str, path: Path, sha256: str, progress: Step | None = None) -> None:
        self._check()
        sent = 0

        def blocks() -> Iterator[bytes]:
            nonlocal sent
            digest = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    sent += len(block)
                    if progress:
                        progress(len(block))
                    yield block
            # What is raised here ends the upload before it is completed: nothing appears under the key.
            if digest.hexdigest() != sha256:
                raise CorruptFileError(
                    f"{path} does not have the digest sha256:{sha256}.", "It changed, or is damaged."
                )

        def call() -> None:
            nonlocal sent
            if sent and progress:
                progress(-sent)
            sent = 0
            part = max(_PART, path.stat().st_size // _MAX_PARTS)
            obstore.put(self._bucket, key, blocks(), chunk_size=part, max_concurrency=4)

        self._call(key, call, missing="The bucket does not exist.")

    def delete(self, *keys: str) -> None:
        if keys:
            # An object that is not there is no error, so this can only be the bucket.
            missing = "The bucket does not exist."
            self._call(keys[0], lambda: obstore.delete(self._bucket, list(keys)), missing=missing)

    def delete_once(self, *keys: str) -> None:
        try:
            obstore.delete(self._once, list(keys))
        except BaseError as error:
            raise SourceError(
                f"{len(keys)} objects of {self._where} could not be deleted: {_reason(error)}.",
                "Check the server and the network, then collect again.",
            ) from error

    def sweep(self, before: datetime) -> int:
        return 0

    def _put(self, key: str, data: bytes, mode: object) -> str:
        def call() -> str:
            result = obstore.put(self._bucket, key, data, mode=mode, use_multipart=False)  # type: ignore[arg-type]
            return result["e_tag"] or ""

        return self._call(key, call, missing="The bucket does not exist.")

    def _check(self) -> None:
        """Raises InvalidRequestError when this server is not safe to commit to. Asked once, by the first write."""
        with self._checking:
            if not self._checked:
                self._probe(f"probe/{uuid.uuid4().hex}")
                self._checked = True

    def _probe(self, key: str) -> None:
        unsafe = (
            "Nodes could overwrite each other's snapshots and names. Use a server, or a version of it, that has it."
        )
        try:
            etag = self._put(key, b"probe", "create")
        except PreconditionError as error:  # repeated after an answer that was lost, it has met itself
            self.delete(key)
            raise SourceError(f"{self._where} does not answer as it should.", "Try again.") from error
        try:
            if not self._refuses(key, "create"):
                raise InvalidRequestError(f"The server of {self._where} ignores If-None-Match.", unsafe)
            if not self._refuses(key, {"e_tag": '"00000000000000000000000000000000"'}):
                raise InvalidRequestError(f"The server of {self._where} ignores If-Match.", unsafe)
            try:
                self._put(key, b"again", {"e_tag": etag})
            except (PreconditionError, SourceError) as error:
                raise InvalidRequestError(
                    f"The server of {self._where} refuses If-Match: {error}.", unsafe
                ) from error
            if self.read(key, 1, 3) != b"gai":
                raise InvalidRequestError(f"The server of {self._where} ignores Range.", "Layers are read by range.")
        finally:
            self.delete(key)

    def _refuses(self, key: str, mode: object) -> bool:
        try:
            self._put(key, b"other", mode)
        except PreconditionError:
            return True
        return False

    def _call(self, key: str, call: Callable[[], Result], missing: str | None = None) -> Result:
        """The result of a request that is safe to repeat: everything but a conditional put is; after one of those its
        caller looks at what is there. ``missing`` is what a 404 means, when not that there is no such object.
        """
        ends = time.monotonic() + self._deadline
        pause = _PAUSES[0]
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                if missing:
                    raise SourceError(f"{self._where}: {missing}", "Create it, or correct its name.") from error
                raise ObjectMissingError(f"{self._where}/{key} does not exist.") from error
            except (AlreadyExistsError, RefusedError) as error:
                raise PreconditionError(f"{self._where}/{key} exists, or was changed by somebody else.") from error
            except (PermissionDeniedError, UnauthenticatedError) as error:
                raise SourceError(
                    f"{self._where}/{key} may not be used: {_reason(error)}.",
                    "Check the keys and the bucket's policy.",
                ) from error
            except BaseError as error:
                if not _passes(error) or time.monotonic() + pause > ends:
                    raise SourceError(
                        f"{self._where}/{key} cannot be used now: {_reason(error)}.",
                        "Check the server and the network.",
                    ) from error
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _PAUSES[1])


class S3Source:
    """``OpenObject`` of one object."""

    def __init__(self, store: S3Store, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, self._key)
        try:
            return self._store.read(self._key, offset, length)
        except ObjectMissingError as error:
            raise SourceError(error.message) from error

    def close(self) -> None:
        pass


def _bucket(settings: RepositorySettings, deadline: float, retries: int) -> Bucket:
    endpoint = settings.endpoint
    if endpoint and settings.addressing == "virtual":
        parts = urlsplit(endpoint)
        endpoint = urlunsplit(parts._replace(netloc=f"{settings.bucket}.{parts.netloc}"))
    config: S3Config = {
        "region": settings.region or "",
        "virtual_hosted_style_request": settings.addressing == "virtual",
    }
    if endpoint:
        config["endpoint"] = endpoint
    if settings.access_key_id and settings.secret_access_key:
        config["access_key_id"] = settings.access_key_id
        config["secret_access_key"] = settings.secret_access_key
    if settings.session_token:
        config["session_token"] = settings.session_token
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=min(5.0, deadline)),
        "timeout": timedelta(seconds=deadline),
        "read_timeout": timedelta(seconds=min(20.0, deadline)),
    }
    if endpoint and endpoint.startswith("http://"):
        client["allow_http"] = True
    if settings.ca_file:
        try:
            client["root_certificate"] = settings.ca_file.read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{settings.ca_file} cannot be read: {error.strerror}.") from error
    try:
        return Bucket(
            settings.bucket,
            prefix=settings.prefix.strip("/") or None,
            config=config,
            client_options=client,
            credential_provider=CredentialProcess(settings.credential_process)
            if settings.credential_process
            else None,
            retry_config={
                "max_retries": retries,
                "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
                "retry_timeout": timedelta(seconds=deadline / 2),
            },
        )
    except BaseError as error:
        raise InvalidRequestError(f"The settings of the S3 repository are wrong: {_reason(error)}.") from error


def _info(key: str, meta: "obstore.ObjectMeta") -> ObjectInfo:
    return ObjectInfo(key, meta["size"], meta["e_tag"] or "", meta["last_modified"])


def _passes(error: BaseError) -> bool:
    """Whether trying again may help: not when the server said that the request itself is wrong."""
    status = re.search(r"status code: (\d{3})", str(error))
    return status is None or status[1][0] != "4" or status[1] in ("408", "429")


def _reason(error: Exception) -> str:
    """What an error of obstore says, without its dump of structures: the server's message, or the innermost cause."""
    text = str(error)
    if found := re.search(r"<Message>(.*?)</Message>", text):
        return found[1].rstrip(".")
    text = text.split("\n\nDebug source", 1)[0].strip()
    return (text.rpartition(": ")[2] if "HTTP error" in text else text).rstrip(".: ")
