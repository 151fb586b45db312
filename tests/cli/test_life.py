"""Sandboxes from the first to the last command, without a terminal and on one."""

import json
import re

import pytest

from tests.cli.conftest import Run, Spawn, finished

pytestmark = pytest.mark.usefixtures("clean")
ID = r"i[a-z0-9]{19}"


def test_a_life(aenv: Run, terminal: Spawn, sandbox: str) -> None:
    parent = aenv(
        "start", "base", "-dq", "--timeout", "20m", "-m", "project=demo", "-m", "role=parent", "-e", "MODE=test",
        "--on-timeout", "kill", "--no-internet",
    ).stdout.strip()  # fmt: skip
    assert re.fullmatch(ID, parent)
    info = json.loads(aenv("info", parent).stdout)
    assert info["metadata"] == {"project": "demo", "role": "parent"}
    assert (info["lifecycle"]["onTimeout"], info["allowInternetAccess"]) == ("kill", False)
    assert "envdAccessToken" in info
    assert aenv("exec", parent, "echo $MODE").stdout == "test\n"

    children = aenv("fork", parent, "--count", "2", "-q").stdout.split()
    assert len(set(children)) == 2
    code, shown = finished(terminal("tree", NO_COLOR="1"))
    assert code == 0
    assert re.search(
        rf"base\n├── {sandbox}  running  .*\n└── {parent}  running  .*  project=demo, role=parent\n"
        rf"    ├── ({'|'.join(children)})  running  .*\n    └── ({'|'.join(children)})  running  ",
        shown,
    ), shown

    aenv("pause", *children)
    assert set(aenv("ls", "--state", "paused", "-q").stdout.split()) == set(children)
    assert set(aenv("ls", "-m", "role=parent", "-m", "project=demo", "-q").stdout.split()) == {parent, *children}
    aenv("resume", children[0], "--timeout", "2h")
    assert aenv("exec", children[0], "echo $MODE").stdout == "test\n"
    aenv("rm", parent)
    tree = json.loads(aenv("tree").stdout)
    (gone,) = [item for item in tree[0]["sandboxes"] if item["sandboxID"] == parent]
    assert gone["state"] == "gone"
    assert {child["sandboxID"] for child in gone["children"]} == set(children)


def test_a_table_on_a_terminal_and_json_in_a_pipe(aenv: Run, terminal: Spawn, sandbox: str) -> None:
    other = aenv("start", "-q", "-m", "about=" + "long " * 20).stdout.strip()
    for columns in (80, 200):
        code, shown = finished(terminal("ls", columns=columns))
        assert code == 0
        assert "\033[32mrunning\033[0m" in shown
        plain = re.sub(r"\033\[[0-9;]*m", "", shown).splitlines()
        assert plain[0].split()[:3] == ["SANDBOX", "TEMPLATE", "STATE"]
        assert [line.split()[0] for line in plain[1:]] == [other, sandbox]
        assert max(map(len, plain)) <= columns
        assert ("MEMORY" in plain[0]) == (columns == 200)
    assert "\033" not in finished(terminal("ls", NO_COLOR="1"))[1]
    assert [item["sandboxID"] for item in json.loads(aenv("ls").stdout)] == [other, sandbox]
    assert aenv("ls", "-o", "table").stdout.startswith("SANDBOX ")
    _, coloured = finished(terminal("ls", "-o", "json"))
    found = json.loads(re.sub(r"\033\[[0-9;]*m", "", coloured))
    assert found[0]["metadata"]["about"].startswith("long ")
    assert aenv("ls", "-t", "nothing", "-o", "table").stdout == "No sandboxes. `aenv start base` starts one.\n"


def test_info_says_everything_in_words(aenv: Run, terminal: Spawn) -> None:
    made = aenv("start", "-q", "--timeout", "20m", "-m", "a=b", "-m", "c=d", "--no-secure").stdout.strip()
    aenv("timeout", made, "30m")
    code, shown = finished(terminal("info", made[:8], NO_COLOR="1"))
    assert code == 0
    assert f"Sandbox   {made}\n" in shown
    assert re.search(r"\nEnds      .*, in (29m \d+s|30m); then it is paused\n", shown)
    assert "\nMachine   1 vCPU, 512 MiB memory, 4 GiB disk\n" in shown
    assert "\nAccess    without a token\n" in shown
    assert "\nMetadata  a=b\n          c=d\n" in shown


def test_remarks_are_for_terminals(aenv: Run, terminal: Spawn) -> None:
    made = aenv("start", "-q").stdout.strip()
    done = aenv("pause", made)
    assert (done.stdout, done.stderr) == ("", "")
    assert finished(terminal("resume", made)) == (
        0, f"{made} runs, for 5m unless `aenv timeout` says otherwise\n"
    )  # fmt: skip
    code, shown = finished(terminal("start", "base", "-d"))
    assert code == 0
    assert re.fullmatch(rf"Sandbox ({ID}) started\.\n  aenv connect \1 .*\n  aenv rm \1 .*\n", shown), shown


def test_deleting_asks_before_it_deletes_everything(aenv: Run, terminal: Spawn, sandbox: str) -> None:
    child = terminal("rm", "--all")
    child.expect(r"Delete 1 sandbox\? \[y/N\]: ")
    child.sendline("n")
    assert finished(child)[0] == 130
    assert sandbox in aenv("ls", "-q").stdout.split()


def test_snapshots(aenv: Run, terminal: Spawn, sandbox: str) -> None:
    aenv("exec", sandbox, "echo kept > snapshot-file")
    unnamed = aenv("snapshot", "create", sandbox, "-q").stdout.strip()
    code, shown = finished(terminal("snapshot", "create", sandbox, "-n", "run:step-1"))
    assert (code, shown) == (0, "Snapshot run:step-1 saved: aenv start run:step-1\n")
    assert [item["names"] for item in json.loads(aenv("snapshot", "ls", "-s", sandbox[:6]).stdout)] == [
        ["run:step-1"],
        [],
    ]
    code, shown = finished(terminal("snapshot", "ls", NO_COLOR="1"))
    assert code == 0
    assert re.search(rf"\n-  +{unnamed} +\d+s ago    1  512 MiB  4 GiB\n", shown), shown
    made = aenv("start", "run:step-1", "-q").stdout.strip()
    assert aenv("exec", made, "cat snapshot-file").stdout == "kept\n"
    done = aenv("snapshot", "rm", unnamed, "nothing", "run:step-1", check=False)
    assert done.returncode == 1
    assert done.stderr == "error: There is no snapshot 'nothing'.\n`aenv snapshot ls` lists them.\n"
    assert aenv("snapshot", "ls", "-q").stdout == ""


def test_logs_and_metrics(aenv: Run, terminal: Spawn, sandbox: str) -> None:
    aenv("exec", "-u", "root", sandbox, "echo 'on the console' > /dev/ttyS0")
    made = aenv("start", "-q").stdout.strip()
    follow = terminal("logs", "-f", made, NO_COLOR="1")
    follow.expect(r"\d\d:\d\d:\d\d\.\d{3}  info   created from template base")
    aenv("exec", "-u", "root", made, r"printf 'red \033[31m line\n' > /dev/ttyS0")
    follow.expect("info   red  line")  # the server takes colours out
    aenv("rm", made)
    assert finished(follow)[0] == 0
    entries = [json.loads(line) for line in aenv("logs", sandbox, "--search", "on the console").stdout.splitlines()]
    assert [entry["message"] for entry in entries] == ["on the console"]
    shown = aenv("metrics", "-o", "table").stdout.splitlines()
    assert shown[0].split() == ["SANDBOX", "TIME", "CPU", "MEMORY", "DISK"]
    assert re.fullmatch(rf"{sandbox}  \d\d:\d\d:\d\d  \d+% of 1  .* of \d+ MiB  .* MiB of 3\.9 GiB  .*", shown[1])
    (samples,) = json.loads(aenv("metrics", sandbox).stdout).values()
    assert 0 < samples[0]["memUsed"] < samples[0]["memTotal"]


def test_another_size_is_another_template_made_once(aenv: Run) -> None:
    for _ in range(2):
        made = aenv("start", "base", "-q", "--mem", "640").stdout.strip()
        assert json.loads(aenv("info", made).stdout)["memoryMB"] == 640
    assert "base-1cpu-640mb" in aenv("template", "ls").stdout
    aenv("template", "rm", "base-1cpu-640mb")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("info", "nope"), 1, "error: There is no sandbox 'nope'.\n`aenv ls` lists them.\n"),
        (("start", "nope"), 1, "error: There is no template or snapshot 'nope'.\n`aenv template ls` lists them.\n"),
        (("template", "watch", "nope"), 1, "error: There is no template 'nope'.\n`aenv template ls` lists them.\n"),
        (("template", "rm", "base"), 1, "error: The template 'base' is the node's own and cannot be deleted.\n"),
        (("connect", "nope"), 1, "error: A shell needs a terminal.\n`aenv exec nope COMMAND` runs a command without"),
        (("sart",), 2, "error: There is no command 'sart'. Did you mean 'start'?\n`aenv --help` shows"),
        (("ls", "--sate", "x"), 2, "error: No such option '--sate'"),
        (("ls", "-s", "gone"), 2, "error: Invalid value for '-s' / '--state': 'gone' is not one of"),
        (("start", "--timeout", "soon"), 2, "error: Invalid value for '--timeout': 'soon' is not a length of time"),
        (("start", "-e", "NOT_SET_HERE"), 2, "error: Invalid value for '-e' / '--env': 'NOT_SET_HERE' is not NAME="),
        (("rm",), 2, "error: Name the sandboxes to delete, or use --all.\n"),
        (("exec",), 2, "error: Missing argument 'SANDBOX'"),
    ],
)
def test_errors_say_what_to_do(aenv: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = aenv(*arguments, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message), done.stderr


def test_a_beginning_that_several_ids_have(aenv: Run) -> None:
    aenv("start", "-q")
    done = aenv("info", "i", check=False)
    assert done.returncode == 1
    assert re.match(rf"error: 'i' is the beginning of 2 ids: {ID}, {ID}\.\n", done.stderr)
