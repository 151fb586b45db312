"""Which server is talked to: logging in, the doctor, and servers that are not there."""

import json
import re
import stat
from pathlib import Path

from tests.cli.conftest import Run, Spawn, finished
from tests.node.process import NodeProcess, free_port


def test_log_in_and_out(aenv: Run, terminal: Spawn, node: NodeProcess, tmp_path: Path) -> None:
    alone = {"HOME": str(tmp_path), "AENV_API_URL": "", "AENV_API_KEY": "", "AENV_HOME": str(tmp_path)}
    path = tmp_path / ".config/aenv/credentials"
    done = aenv("auth", "login", "--url", node.url, "--key-stdin", text="wrong\n", check=False, **alone)
    assert (done.returncode, path.exists()) == (1, False)
    assert done.stderr.startswith(f"error: {node.url} does not accept this key.\n")

    child = terminal("auth", "login", **alone)
    child.expect_exact("Address [http://127.0.0.1:8000]: ")
    child.sendline(node.url)
    child.expect_exact("API key: ")
    child.sendline(node.api_key)
    code, shown = finished(child)
    assert code == 0
    assert node.api_key not in shown
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    assert json.loads(aenv("ls", **alone).stdout) is not None
    status = json.loads(aenv("auth", "status", **alone).stdout)
    assert (status["apiUrl"], status["apiUrlFrom"], status["valid"]) == (node.url, str(path), True)
    code, shown = finished(terminal("auth", "status", NO_COLOR="1", **alone))
    assert code == 0
    assert re.search(r"\nKey       e2b_.{4}….{4}, from .*\nAccepted  yes\n", shown), shown
    aenv("auth", "logout", **alone)
    assert not path.exists()
    done = aenv("ls", check=False, **alone)
    assert done.returncode == 1
    assert done.stderr.startswith("error: There is no API key for http://127.0.0.1:8000.\nRun `aenv auth login`")


def test_keys_that_are_not_valid(aenv: Run, node: NodeProcess) -> None:
    done = aenv("ls", check=False, AENV_API_KEY="wrong")
    assert done.returncode == 1
    assert done.stderr.endswith(f"\nThe server is {node.url}. `aenv auth login` stores another key.\n")
    done = aenv("ls", check=False, AENV_API_KEY="ключ\n")
    assert (done.returncode, done.stderr.count("\n")) == (1, 2)
    assert done.stderr.startswith("error: The API key has characters that no key has.\n")
    done = aenv("auth", "status", check=False, AENV_API_KEY="wrong")
    assert (done.returncode, json.loads(done.stdout)["valid"]) == (1, False)


def test_a_server_that_is_not_there(aenv: Run) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = aenv("ls", check=False, AENV_API_URL=url)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: Cannot reach {url}: Connection refused.\n"
        "Is aenv-server running there? `aenv doctor` looks closer.\n",
    )
    done = aenv("exec", "i", "true", check=False, AENV_API_URL=url)
    assert done.returncode == 125
    done = aenv("ls", check=False, AENV_API_URL="host:8000")
    assert done.stderr == "error: 'host:8000' is not the address of a server.\nIt looks like http://host:8000.\n"


def test_e2b_variables_are_enough(aenv: Run, node: NodeProcess) -> None:
    others = {"AENV_API_URL": "", "AENV_API_KEY": "", "E2B_API_URL": node.url, "E2B_API_KEY": node.api_key}
    assert json.loads(aenv("node", "ls", **others).stdout)[0]["status"] == "ready"


def test_the_doctor(aenv: Run, terminal: Spawn, node: NodeProcess) -> None:
    found = json.loads(aenv("doctor", "--sandbox", AENV_HOME=str(node.home)).stdout)
    results = {(item["what"], item["result"]) for item in found}
    assert {
        ("Answers", "good"),
        ("Key", "good"),
        ("Node", "good"),
        ("Templates", "good"),
        ("Sandbox", "good"),
    } <= results
    machine = [item for item in found if item["what"] == "Machine"]
    assert [item["text"].split(":")[0].split(",")[0] for item in machine] == [
        "firecracker/kvm", "firecracker/pvm", "qemu/kvm", "qemu/tcg"
    ]  # fmt: skip
    assert {item["result"] for item in found if item["what"] == "Jail"} <= {"good", "warning"}
    assert [item["result"] for item in machine if ", in use: " in item["text"]] == ["good"]
    assert all(item["advice"] for item in machine if item["result"] == "unused")
    if "qemu/tcg, in use" in " ".join(item["text"] for item in machine):  # best last: nothing before it works
        kvm = next(item["text"] for item in machine if item["text"].startswith("qemu/kvm"))
        assert re.search("KVM is here and cannot run this kernel|/dev/kvm (does not exist|may not be opened)", kvm)


def test_the_doctor_without_a_server_looks_at_this_machine(aenv: Run, node: NodeProcess) -> None:
    done = aenv("doctor", "-o", "json", check=False, AENV_API_URL="http://127.0.0.1:9", AENV_HOME=str(node.home))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert ("Answers", "bad") in {(item["what"], item["result"]) for item in found}
    machine = [item["text"].split(":")[0] for item in found if item["what"] == "Machine" and item["result"] == "good"]
    assert "qemu/tcg" in machine


def test_the_doctor_refuses_a_wrong_key(terminal: Spawn) -> None:
    code, shown = finished(terminal("doctor", NO_COLOR="1", AENV_API_KEY="wrong"))
    assert code == 1
    assert re.search(r"\n✗ Key        .*not valid", shown), shown
    assert max(map(len, shown.splitlines())) <= 80


def test_nodes(terminal: Spawn) -> None:
    code, shown = finished(terminal("node", "ls", NO_COLOR="1"))
    assert code == 0
    titles, node = shown.splitlines()
    assert titles.split() == ["NODE", "STATUS", "VERSION", "RUNNING", "PAUSED", "CPU", "MEMORY", "DISK"]
    assert re.search(r"  ready +0\.\d+\.\d+ +\d+ +\d+ +\d+% of \d+  .* GiB  .* GiB$", node), node


def test_completion(aenv: Run, sandbox: str) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_AENV_COMPLETE" in aenv("completion", shell).stdout
    ask = {"_AENV_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
    assert sandbox in aenv(COMP_WORDS="aenv exec i", **ask).stdout
    assert aenv(COMP_WORDS="aenv start ", **ask).stdout.split() == ["plain,base"]
    assert aenv(COMP_WORDS="aenv exec i", AENV_API_KEY="wrong", **ask).stdout.strip() == ""
    assert "plain,port-forward" in aenv(COMP_WORDS="aenv po", _AENV_COMPLETE="bash_complete", COMP_CWORD="1").stdout
