"""``aenv pull`` and ``build``: images and Dockerfiles become templates."""

import os
import re
import signal
import subprocess
from pathlib import Path
from textwrap import dedent

import httpx
import pytest

from tests.cli.conftest import AENV, TIMEOUT, Run, Spawn, finished
from tests.node.process import NodeProcess, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean")]


@pytest.fixture(autouse=True)
def without_templates(api: httpx.Client) -> object:
    """No template but the node's own is left."""
    yield
    for template in api.get("/v2/templates").json():
        if "base" not in template["names"]:
            assert api.delete(f"/templates/{template['templateID']}").status_code == 204


def dockerfile(folder: Path, text: str, **files: str) -> Path:
    for name, content in {"Dockerfile": dedent(text), **files}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def in_sandbox(aenv: Run, template: str, command: str) -> str:
    made = aenv("start", template, "-q").stdout.strip()
    output: str = aenv("exec", made, command).stdout
    aenv("rm", made)
    return output


def test_an_image_and_a_dockerfile_on_it(
    aenv: Run, terminal: Spawn, registry: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    code, shown = finished(terminal("pull", f"{registry}/tiny:1", NO_COLOR="1"))
    assert code == 0
    assert shown.splitlines()[0] == f"FROM image {registry}/tiny:1"
    assert shown.endswith("Template tiny is ready: aenv start tiny\n")
    # Its folder and variables are the image's; its user is the platform's, for it names none.
    assert in_sandbox(aenv, "tiny", "id -un; pwd; echo $FROM_IMAGE") == "user\n/app\nyes\n"

    folder = dockerfile(
        tmp_path,
        f"""\
        # syntax=docker/dockerfile:1
        ARG REGISTRY={registry}
        FROM $REGISTRY/tiny:1 AS make
        ARG VERSION=1
        RUN id -un > who && pwd >> who && echo "$FROM_IMAGE $VERSION" >> who
        RUN ["/bin/sh", "-c", "echo exec form > exec"]
        FROM make AS unused
        RUN false
        FROM $REGISTRY/tiny:1
        ENV MODE=built PATH=/opt/bin:$PATH
        WORKDIR /srv/app
        COPY --from=make /app/who /app/exec ./
        COPY --chmod=750 --chown=user *.txt src folder/
        COPY <<run.sh /opt/bin/
        #!/bin/sh
        echo here-document $MODE
        run.sh
        RUN chmod 755 /opt/bin/run.sh && <<EOF cat > heredoc
        $MODE
        EOF
        ADD pack.tar.gz unpacked/
        """,
        **{"a.txt": "A", "b.txt": "B", "c.log": "C", "src__deep__x": "X", ".dockerignore": "b.txt\n"},
    )
    subprocess.run(["tar", "-czf", "pack.tar.gz", "a.txt"], cwd=folder, check=True)
    code, shown = finished(terminal("build", str(folder), "-n", "app:v1", "--build-arg", "VERSION=2", NO_COLOR="1"))
    assert code == 0, shown
    assert "── stage make\n" in shown
    assert "unused" not in shown
    assert "[1/7] ENV MODE=built PATH=/opt/bin:$PATH" in shown
    assert shown.endswith("Template app:v1 is ready: aenv start app:v1\n")
    script = "id -un; pwd; cat who exec heredoc; run.sh; ls -R folder unpacked\n"
    script += "stat -c '%a %U' folder/a.txt; echo $FROM_IMAGE"
    assert in_sandbox(aenv, "app:v1", script).split("\n") == [
        *("user", "/srv/app", "root", "/app", "yes 2", "exec form", "built", "here-document built"),
        *("folder:", "a.txt", "deep", "", "folder/deep:", "x", "", "unpacked:", "a.txt", "750 user", "yes", ""),
    ]
    # Again: everything is cached, and only a changed step runs.
    (folder / "Dockerfile").write_text((folder / "Dockerfile").read_text() + "USER user\nRUN id -u > uid\n")
    code, shown = finished(terminal("build", str(folder), "-n", "app:v1", "--build-arg", "VERSION=2", NO_COLOR="1"))
    assert code == 1
    assert re.search(r"error: .*/Dockerfile: line \d+: RUN id -u > uid: ", shown), shown
    assert "[7/9] ADD pack.tar.gz unpacked/  cached\n" in shown


def test_the_start_command_runs_in_the_template(aenv: Run, registry: str, tmp_path: Path) -> None:
    folder = dockerfile(
        tmp_path,
        """\
        FROM base
        EXPOSE 8123
        WORKDIR /srv
        RUN echo served > index.html
        USER root
        CMD ["python3", "-m", "http.server", "8123"]
        """,
    )
    aenv("build", str(folder / "Dockerfile"), "-n", "served")
    fetch = "python3 -c \"import urllib.request as r; print(r.urlopen('http://127.0.0.1:8123').read())\"; id -un"
    assert in_sandbox(aenv, "served", fetch) == "b'served\\n'\nroot\n"


READY = ["--ready", "test -s /dev/shm/serve"]


def test_the_command_of_an_image_runs_in_its_template(aenv: Run, registry: str) -> None:
    aenv("pull", f"{registry}/serving:1", *READY)
    assert in_sandbox(aenv, "serving", "cat /dev/shm/serve") == "0\n/app\nimage:two words x\n"
    aenv("pull", f"{registry}/serving:1", "-n", "not-serving", "--no-start")
    assert in_sandbox(aenv, "not-serving", "cat /dev/shm/serve 2>/dev/null || echo none") == "none\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("ENV MODE=mine", "0\n/app\nmine:two words x\n"),
        ('CMD ["own"]', "0\n/app\nimage:own\n"),
        ("USER user\nWORKDIR /tmp", "1000\n/tmp\nimage:two words x\n"),
        ('CMD ["own"]\nENTRYPOINT ["/bin/serve", "first"]', "0\n/app\nimage:first own\n"),
    ],
)
def test_a_dockerfile_goes_on_with_the_command_of_its_image(
    aenv: Run, registry: str, tmp_path: Path, lines: str, said: str
) -> None:
    dockerfile(tmp_path, f"FROM {registry}/serving:1\n{lines}\n")
    aenv("build", str(tmp_path), "-n", "goes-on", *READY)
    assert in_sandbox(aenv, "goes-on", "cat /dev/shm/serve") == said


def test_an_empty_entrypoint_is_none(aenv: Run, registry: str, tmp_path: Path) -> None:
    dockerfile(tmp_path, f"FROM {registry}/serving:1\nENTRYPOINT []\n")
    aenv("build", str(tmp_path), "-n", "no-entrypoint")
    assert in_sandbox(aenv, "no-entrypoint", "cat /dev/shm/serve 2>/dev/null || echo none") == "none\n"


def test_an_image_whose_command_does_not_stay_becomes_a_template(aenv: Run, registry: str, tmp_path: Path) -> None:
    done = aenv("pull", f"{registry}/failing:1")
    assert "going on without the image's command: " in done.stderr and "sorry" in done.stderr
    assert in_sandbox(aenv, "failing", "pwd; true") == "/app\n"
    done = aenv("pull", f"{registry}/shell:1")
    assert "there is nothing to wait for" in done.stderr
    assert in_sandbox(aenv, "shell", "pwd; true") == "/app\n"
    # A command that somebody asked for has to work.
    dockerfile(tmp_path, f"FROM {registry}/failing:1\nCMD exit 4\n")
    done = aenv("build", str(tmp_path), "-n", "asked-for", check=False)
    assert done.returncode == 1 and "exit status 4" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM base\nRUN true\nRUN exit 7\n", "line 3: RUN exit 7: exit status 7"),
        (
            "FROM base\nRUN echo said; exit 7\n",
            "line 2: RUN echo said; exit 7: exit status 7; its output ends with: said",
        ),
        ("FROM base\nCOPY missing /x\n", "line 2: COPY missing /x: 'missing' is not in the build context"),
        (
            "FROM base AS one\nFROM base\nCOPY --from=one /missing /x\n",
            "line 3: COPY --from=one /missing /x: there is no",
        ),
        ("FROM base\nHEALTHCHECK NONE\n", "line 2: HEALTHCHECK is not supported.\nRemove it; "),
        ("FROM base\nUSER nobody-here\n", "line 2: USER nobody-here: "),
        ("FROM {registry}/missing:1\n", ""),
    ],
)
def test_what_fails_names_its_line_and_leaves_nothing(
    aenv: Run, api: httpx.Client, registry: str, tmp_path: Path, text: str, message: str
) -> None:
    dockerfile(tmp_path, text.format(registry=registry))
    done = aenv("build", ".", "-n", "broken", check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert f"error: {'Dockerfile: ' if message else ''}{message}" in done.stderr, done.stderr
    assert [item["names"] for item in api.get("/v2/templates").json()] == [["base"]]
    assert aenv("ls", "-q").stdout.count("\n") == 1


def interrupted(environment: dict[str, str], folder: Path, name: str) -> str:
    """What a build says that gets Ctrl-C in its step."""
    child = subprocess.Popen(
        [AENV, "build", str(folder), "-n", name],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr is not None
    line = child.stderr.readline()
    while line and "waiting here" not in line.strip().splitlines()[0].removeprefix("[1/1]"):
        line = child.stderr.readline()
    os.kill(child.pid, signal.SIGINT)
    said = child.stderr.read()
    assert child.wait(TIMEOUT) == 130
    child.stderr.close()
    return said


def test_an_interrupted_build(
    aenv: Run, api: httpx.Client, node: NodeProcess, environment: dict[str, str], tmp_path: Path
) -> None:
    slow = dockerfile(tmp_path / "slow", "FROM base\nRUN echo waiting here; sleep 8\n")
    said = interrupted(environment, slow, "new")
    assert said.strip() == ""
    assert [item["names"] for item in api.get("/v2/templates").json()] == [["base"]]
    wait_for(lambda: not node.records("builds"), "the build to be gone")

    quick = dockerfile(tmp_path / "quick", "FROM base\nRUN true\n")
    aenv("build", str(quick), "-n", "there")
    before = api.get("/templates/there").json()
    assert interrupted(environment, slow, "there").strip() == ""
    assert api.get("/templates/there").json() == before, "the build is forgotten, and the template as it was"
    assert len(node.records("builds")) == 1
    assert in_sandbox(aenv, "there", "echo works") == "works\n"


def test_usage(aenv: Run, tmp_path: Path) -> None:
    done = aenv("build", str(tmp_path / "none"), check=False)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {tmp_path / 'none'} cannot be read: No such file or directory.\n",
    )
    done = aenv("pull", "x", "--ready", "true", "--ready-port", "80", check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        "error: --ready and --ready-port say the same thing twice: use one of them.",
    )
    done = aenv("pull", "x", "--username", "me", check=False)
    assert done.returncode == 2
