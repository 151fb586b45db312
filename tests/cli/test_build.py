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
    said = interrupted(environment, slow, "there")
    assert "error: The build of there cannot be cancelled: the server goes on with it.\n" in said
    assert "`aenv template watch there` follows it" in said
    done = aenv("template", "watch", "there")
    assert "waiting here" in done.stderr


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
