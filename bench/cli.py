"""What a user of the command line waits for: processes of ``aenv``, beside the least that could be done instead.

``python -m bench.cli`` for this alone, on a node of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from e2b import Sandbox
from tests.node.process import NodeProcess

from aenv.client.guest import ENVD_PORT
from aenv.network.addressing import slot_at
from aenv.network.settings import NetworkSettings
from bench.by_hand import run_command
from bench.calls import timed
from bench.report import Report, Row

PREFIX, CIDR = "aenvl", "10.239.0.0/16"  # of the node's network slots
AENV = str(Path(sys.executable).parent / "aenv")
IMPORT = "import time; began = time.perf_counter(); import aenv.cli.main; print(time.perf_counter() - began)"
# One request with the standard library: what a script of one's own would be.
LIST = """
import http.client, os
connection = http.client.HTTPConnection(os.environ["AENV_API_URL"].partition("://")[2])
connection.request("GET", "/v2/sandboxes", headers={"X-API-Key": os.environ["AENV_API_KEY"]})
print(connection.getresponse().read())
"""


def cli(
    node: NodeProcess, create: Callable[[], Sandbox], host_of: Callable[[str], str], report: Report, rounds: int
) -> None:
    environment = {**os.environ, "AENV_API_URL": node.url, "AENV_API_KEY": node.api_key}
    sandbox = create()
    guest, token = host_of(sandbox.sandbox_id), sandbox._envd_access_token

    def compare(name: str, argv: Sequence[str], by_hand: Callable[[], object], note: str) -> None:
        """From spawning a process to its end."""
        report.add(Row(name, timed(lambda: _run(argv, environment), rounds), timed(by_hand, rounds), note=note))

    report.add(Row("aenv: imports before a command is known", _imports(rounds), None, note="within the process"))
    python = [sys.executable, "-c"]
    compare("aenv --help", [AENV, "--help"], lambda: _run([*python, "pass"], environment), "by hand: python -c pass")
    compare("aenv ls", [AENV, "ls"], lambda: _run([*python, LIST], environment), "by hand: one GET in a script")
    compare(
        "aenv exec true",
        [AENV, "exec", "-n", sandbox.sandbox_id, "true"],
        lambda: run_command(guest, ENVD_PORT, "true", token),
        "by hand: a socket to the guest, in a process that runs already",
    )
    sandbox.kill()


def _run(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)


def _imports(rounds: int) -> float:
    times = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        times.append(1000 * float(done.stdout))
    return statistics.median(times)


def _alone(rounds: int) -> None:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="aenv-bench-", dir="/var/tmp") as folder:
        node = NodeProcess(Path(folder), prefix=PREFIX, cidr=CIDR)
        try:
            node.start()
            settings = NetworkSettings(prefix=PREFIX, pool_cidr=CIDR)

            def create() -> Sandbox:
                return Sandbox.create(
                    "base", timeout=3600, api_key=node.api_key, api_url=node.url, sandbox_url=node.url
                )

            def host_of(sandbox_id: str) -> str:
                return slot_at(settings, json.loads(node.records("sandboxes")[sandbox_id])["slot"]).host_address

            cli(node, create, host_of, report, rounds)
        finally:
            node.destroy()
    report.show()


if __name__ == "__main__":
    _alone(10)
