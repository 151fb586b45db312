"""What a guest cannot reach, tried from inside real guests."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network

from e2b import Sandbox

from tests.node.conftest import Create
from tests.node.process import NodeProcess

TRY = """python3 - <<'EOF'
import socket
for host, port in {targets!r}:
    s = socket.socket()
    s.settimeout(2)
    try:
        s.connect((host, port))
        print(host, port, "reached")
    except OSError:
        pass
print("done")
EOF"""


@contextmanager
def host_server() -> Iterator[int]:
    """A TCP server on every address of the host."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        stop = threading.Event()

        def accept() -> None:
            listener.settimeout(0.2)
            while not stop.is_set():
                try:
                    listener.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join()


def own_addresses() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return [probe.getsockname()[0]]
        except OSError:
            return []


def reached(sandbox: Sandbox, targets: list[tuple[str, int]]) -> list[str]:
    output = sandbox.commands.run(TRY.format(targets=targets), timeout=60).stdout.splitlines()
    assert output[-1] == "done"
    return output[:-1]


def slot_addresses(node: NodeProcess, sandbox: Sandbox) -> tuple[str, str]:
    """The host's end and the guest's outer address of a sandbox's slot (two addresses of a /31)."""
    index = json.loads(node.records("sandboxes")[sandbox.sandbox_id])["slot"]
    network = IPv4Network(node.cidr)
    return str(network[index * 2]), str(network[index * 2 + 1])


def test_guests_reach_neither_host_nor_each_other(create: Create, node: NodeProcess) -> None:
    one, other = create(), create()
    other.commands.run("python3 -m http.server 7777", background=True, timeout=0)
    with host_server() as port:
        socket.create_connection(("127.0.0.1", port)).close()  # it does listen
        targets = [
            *((address, port) for address in own_addresses()),
            *((address, port) for address in slot_addresses(node, one)),
            *((address, node.port) for address in slot_addresses(node, one)),
            ("169.254.0.22", port),
            ("169.254.169.254", 80),
            *((address, p) for address in slot_addresses(node, other) for p in (7777, 49983)),
            ("10.0.0.1", 80),
            ("192.168.0.1", 80),
        ]
        assert reached(one, targets) == []
    # The same server is reachable where it should be: through the node.
    assert one.commands.run("echo still fine").stdout == "still fine\n"


def test_nothing_of_a_killed_sandbox_stays(create: Create, node: NodeProcess) -> None:
    from tests.node.process import wait_for

    before = (len(node.vm_pids()), len(node.namespaces()))
    made = [create() for _ in range(3)]
    for sandbox in made:
        sandbox.kill()
    wait_for(lambda: (len(node.vm_pids()), len(node.namespaces())) == before, f"{before} VMs and namespaces")
    for folder in ("sandboxes", "snapshots"):
        names = {path.name for path in (node.home / folder).iterdir()}
        assert names <= set(node.records(folder))
