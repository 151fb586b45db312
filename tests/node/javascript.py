"""Node.js for tests: the packages of tests/js/package-lock.json, installed once beside the other test artefacts."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.node.process import CACHE, NodeProcess

SOURCES = Path(__file__).parents[1] / "js"


def require_node() -> str:
    """The ``node`` program. Fails, rather than skips: scripts/bootstrap.sh --dev installs it."""
    found = shutil.which("node")
    assert found is not None, "node is missing: run scripts/bootstrap.sh --dev"
    return found


def install() -> Path:
    """A folder with the locked packages and a copy of the sources, which modules are resolved beside."""
    lock = (SOURCES / "package-lock.json").read_bytes()
    folder = CACHE / f"js-{hashlib.sha256(lock).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for source in SOURCES.iterdir():
            if source.is_file():
                shutil.copy(source, folder)
        if not (folder / "installed").exists():
            subprocess.run(
                ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
                cwd=folder,
                check=True,
                capture_output=True,
                timeout=240,
            )
            (folder / "installed").touch()
    return folder


def environment(node: NodeProcess, **more: str) -> dict[str, str]:
    """What a user of the JavaScript SDK or the command line sets, and nothing else of E2B's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    return (
        kept
        | {
            "E2B_API_URL": node.url,
            "E2B_SANDBOX_URL": node.url,
            "E2B_API_KEY": node.api_key,
            "NO_COLOR": "1",
        }
        | more
    )
