"""A real S3 server for tests and benchmarks: VersityGW, which scripts/bootstrap.sh --dev installs."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aenv.config import RepositorySettings

REGION, ACCESS, SECRET = "test-region-1", "test-access", "test-secret"
INSTALLED = Path(__file__).parents[2] / ".tools/bin/versitygw"


@dataclass(frozen=True)
class S3Server:
    port: int
    folder: Path  # the bucket's objects are files in it

    def settings(self, prefix: str, port: int | None = None, **other: object) -> RepositorySettings:
        values: dict[str, object] = {
            "backend": "s3",
            "bucket": "bucket",
            "prefix": prefix,
            "region": REGION,
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "access_key_id": ACCESS,
            "secret_access_key": SECRET,
        }
        return RepositorySettings.model_validate(values | other)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server with one bucket, whose files are below ``folder``."""
    binary = str(INSTALLED) if INSTALLED.exists() else shutil.which("versitygw")
    assert binary, "versitygw is not installed: run scripts/bootstrap.sh --dev"
    (folder / "data/bucket").mkdir(parents=True)
    port = free_port()
    command = [binary, "--port", f"127.0.0.1:{port}", "--region", REGION, "--quiet"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "posix", str(folder / "data")],
            env={**os.environ, "ROOT_ACCESS_KEY_ID": ACCESS, "ROOT_SECRET_ACCESS_KEY": SECRET},
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(600):
            if socket.socket().connect_ex(("127.0.0.1", port)) == 0:
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield S3Server(port, folder / "data/bucket")
    finally:
        process.terminate()
        process.wait(10)
