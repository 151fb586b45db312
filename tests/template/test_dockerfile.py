"""Dockerfiles: how they are read, and what becomes of their instructions."""

from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.template.dockerfile import DockerfileError, parse
from aenv.template.dockerfile_model import CopyFiles, InlineFile, Plan
from aenv.template.dockerfile_plan import plan
from aenv.template.steps import Env, Run, User, Workdir

# -- lines and instructions


def texts(content: str) -> list[tuple[int, str, str]]:
    return [(one.line, one.name, one.text) for one in parse(dedent(content)).instructions]


def test_comments_continuations_and_empty_lines() -> None:
    content = """\
        # a comment
        from alpine

        RUN one && \\
            # between the lines
            two && \\

            three
          ENV A=b # not a comment
        RUN echo \\\\
        """
    assert texts(content) == [
        (2, "FROM", "alpine"),
        (4, "RUN", "one &&     two &&     three"),
        (9, "ENV", "A=b # not a comment"),
        (10, "RUN", "echo \\\\"),
    ]


def test_windows_line_ends_and_a_byte_order_mark() -> None:
    assert texts("\ufeffFROM a\r\nRUN x \\\r\n  y\r\n") == [(1, "FROM", "a"), (2, "RUN", "x   y")]


def test_the_escape_directive() -> None:
    content = "# syntax=docker/dockerfile:1\n# escape=`\nFROM a\nRUN x `\n y\nENV P=C:\\\n"
    assert parse(content).escape == "`"
    assert texts(content) == [(3, "FROM", "a"), (4, "RUN", "x  y"), (6, "ENV", "P=C:\\")]
    assert parse("# a comment first\n# escape=`\nFROM a").escape == "\\"
    with pytest.raises(DockerfileError, match="line 1: the escape character"):
        parse("# escape=x\nFROM a")


def test_flags() -> None:
    (one,) = parse("COPY --from=build --chown='a b' --link x y").instructions
    assert one.flags == (("from", "build"), ("chown", "'a b'"), ("link", None))
    assert one.text == "x y"
    assert one.source == "COPY --from=build --chown='a b' --link x y"


def test_lists() -> None:
    run, other, third = parse('RUN ["a", "b c"]\nRUN [ -f x ] && y\nCMD ["a", 1]').instructions
    assert run.json() == ["a", "b c"]
    assert other.json() is None
    assert third.json() is None


def test_here_documents() -> None:
    content = "RUN <<EOF\na\n  b\nEOF\nCOPY <<one <<-'two' /to/\nA\none\n\tB\n\ttwo\n"
    content += "RUN cat <<< x\nRUN echo '<<no' \"<<no\"\n"
    run, copy, here_string, quoted = parse(content).instructions
    assert [(one.name, one.content, one.expand) for one in run.heredocs] == [("EOF", "a\n  b\n", True)]
    assert [(one.name, one.content, one.expand) for one in copy.heredocs] == [
        ("one", "A\n", True),
        ("two", "B\n", False),
    ]
    assert here_string.heredocs == quoted.heredocs == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("FROM a\n=b", "line 2: '=b' does not begin with an instruction"),
        ("RUN <<EOF\na", "line 1: the here-document EOF does not end"),
    ],
)
def test_what_cannot_be_read_names_its_line(content: str, message: str) -> None:
    with pytest.raises(DockerfileError, match=message):
        parse(content)


NAMES = st.sampled_from(["RUN", "run", "ENV", "LABEL", "CMD", "Expose"])
ARGUMENTS = st.lists(st.text("abc=$'\"/#.-<", min_size=1, max_size=6), min_size=1, max_size=5)


@given(st.lists(st.tuples(NAMES, ARGUMENTS, st.lists(st.booleans(), min_size=5, max_size=5)), max_size=5))
def test_instructions_come_back_however_their_lines_are_broken(
    instructions: list[tuple[str, list[str], list[bool]]],
) -> None:
    lines, expected = [], []
    for name, words, breaks in instructions:
        words = [word.lstrip("#<-") or "x" for word in words]
        text = f"{name} {words[0]}"
        for word, broken in zip(words[1:], breaks, strict=False):
            text += f" \\\n# remark\n\n {word}" if broken else f"  {word}"
        lines += [text, "", "# another"]
        expected.append((name.upper(), words))
    found = parse("\n".join(lines)).instructions
    assert [(one.name, one.text.split()) for one in found] == expected


SNIPPETS = st.sampled_from(
    ["FROM a", "FROM a AS b", "RUN ", "COPY --from=b ", "ENV A=", "ARG X", "<<E", "E", "\\", "$A", "${", "'", '"',
     "[", '["a"]', "--mount=", "ADD http://x/y /z", "USER ", "WORKDIR ", "VOLUME ", "EXPOSE ", "SHELL ", "# escape=`",
     "`"]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.one_of(SNIPPETS, st.text(max_size=8), st.just("\n")), max_size=25).map("".join))
def test_any_text_is_read_or_refused_with_its_line(content: str) -> None:
    try:
        plan(parse(content), {})
    except DockerfileError as error:
        assert error.message.startswith(f"line {error.line}: ")
        assert 1 <= error.line <= content.count("\n") + 1


# -- the plan


def of(content: str, target: str | None = None, **arguments: str) -> Plan:
    return plan(parse(dedent(content)), arguments, target)


def actions(content: str, target: str | None = None, **arguments: str) -> list[object]:
    """Of the target."""
    return [step.action for step in of(content, target, **arguments).target.steps]


def sh(text: str) -> Run:
    return Run(f"exec /bin/sh -c {text}", None)


def test_every_instruction_that_gives_a_step() -> None:
    found = actions(
        """\
        FROM alpine:3 AS one
        RUN echo hi
        RUN ["printf", "%s", "a b"]
        SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
        RUN echo hi
        ENV A=1 B="two words"
        ENV OLD style value
        WORKDIR /srv/$A
        USER 1000:1000
        USER nobody
        COPY --chown=a:b --chmod=755 x dir/y /to/
        VOLUME /data "/more data"
        """
    )
    assert found == [
        sh("'echo hi'"),
        Run("exec printf %s 'a b'", None),
        Run("exec /bin/bash -eo pipefail -c 'echo hi'", None),
        Env((("A", "1"), ("B", "two words"))),
        Env((("OLD", "style value"),)),
        Workdir("/srv/1"),
        User("1000"),
        User("nobody"),
        CopyFiles(("x", "dir/y"), "/to/", "a:b", "755"),
        Run("exec mkdir -p -- /data '/more data'", "root"),
    ]


def test_instructions_without_a_step() -> None:
    content = """\
        FROM alpine
        LABEL a=b "c d"=e
        MAINTAINER somebody
        EXPOSE 80 8000-8002 53/udp
        ENTRYPOINT ["serve", "--all"]
        CMD ["a b"]
        """
    target = of(content).target
    assert not target.steps
    assert target.ports == [80, 8000]
    assert target.start_command == "serve --all 'a b'"


@pytest.mark.parametrize(
    ("lines", "command"),
    [
        ("CMD serve $PORT", "/bin/sh -c 'serve $PORT'"),
        ('CMD ["serve"]', "serve"),
        ('ENTRYPOINT ["a"]\nCMD ["b"]', "a b"),
        ('CMD ["b"]\nENTRYPOINT ["a"]', "a b"),
        ('ENTRYPOINT a $X\nCMD ["b"]', "/bin/sh -c 'a $X'"),
        ("CMD one\nCMD two", "/bin/sh -c two"),
        ("RUN x", ""),
    ],
)
def test_what_runs_in_the_template(lines: str, command: str) -> None:
    assert of(f"FROM a\n{lines}").target.start_command == command


def test_an_inherited_command_is_not_for_another_entrypoint() -> None:
    content = 'FROM a AS one\nENTRYPOINT ["x"]\nCMD ["y"]\nFROM one\n'
    assert of(content).target.start_command == "x y"
    assert of(content + 'ENTRYPOINT ["z"]').target.start_command == "z"


def test_arguments() -> None:
    content = """\
        ARG TAG=3 REGISTRY=docker.io
        FROM $REGISTRY/alpine:${TAG} AS one
        ARG TAG
        ARG NAME=me PLAIN
        ENV WHO=$NAME ARCH=$TARGETARCH
        ENV NAME=env
        RUN echo $NAME $TAG
        FROM one
        RUN echo $NAME
        """
    one, last = of(content, TAG="4").stages
    assert one.image == "docker.io/alpine:4"
    assert [step.action for step in one.steps] == [
        Env((("WHO", "me"), ("ARCH", "amd64"))),
        Env((("NAME", "env"),)),
        Run("export TAG=4\nexec /bin/sh -c 'echo $NAME $TAG'", None),
    ]
    assert last.steps[-1].action == sh("'echo $NAME'")  # arguments end with their stage
    assert of(content).stages[0].image == "docker.io/alpine:3"


def test_proxies_are_passed_on_without_being_declared() -> None:
    (run,) = actions("FROM a\nRUN x", https_proxy="http://p")
    assert run == Run("export https_proxy=http://p\nexec /bin/sh -c x", None)


def test_variables_of_the_base_image_are_left_to_the_build() -> None:
    assert actions("FROM a\nENV PATH=/app:$PATH\nWORKDIR $HOME/x\nCOPY f ${PATH:-/d}/") == [
        Env((("PATH", "/app:${PATH}"),)),
        Workdir("${HOME}/x"),
        CopyFiles(("f",), "${PATH:-/d}/", "root:root", ""),
    ]


def test_here_documents_as_scripts_and_files() -> None:
    found = actions(
        "FROM a\n"
        "ARG WHO=me\n"
        "RUN <<EOF\necho one\necho two\nEOF\n"
        "RUN python3 <<EOF\nprint(1)\nEOF\n"
        "RUN <<EOF\n#!/usr/bin/env python3\nprint(2)\nEOF\n"
        'COPY <<a.txt <<"b.txt" /to/\nhello $WHO "x"\na.txt\nhello $WHO\nb.txt\n'
    )
    one, two, three, copy = found
    assert one == Run("export WHO=me\nexec /bin/sh -c 'echo one\necho two\n'", None)
    assert two == Run("export WHO=me\nexec /bin/sh -c 'python3 <<EOF\nprint(1)\nEOF'", None)
    assert isinstance(three, Run)
    assert "#!/usr/bin/env python3\nprint(2)\n" in three.command
    assert isinstance(copy, CopyFiles)
    assert copy.inline == (InlineFile("a.txt", 'hello me "x"\n'), InlineFile("b.txt", "hello $WHO\n"))


def test_add() -> None:
    local, remote = actions(
        "FROM a\nADD x.tar.gz /to/\nADD --checksum=sha256:ab --chmod=0644 https://host/f.bin /to\n"
    )
    assert local == CopyFiles(("x.tar.gz",), "/to/", "root:root", "", unpack=True)
    assert remote == CopyFiles(
        (), "/to", "root:root", "0644", urls=("https://host/f.bin",), unpack=True, checksum="sha256:ab"
    )


def test_sources_are_relative_to_their_root() -> None:
    sources = [
        action.sources[0]
        for action in actions("FROM a\nCOPY /abs x\nCOPY ./a/../b x\nCOPY . x\nCOPY --from=img / x")
        if isinstance(action, CopyFiles)
    ]
    assert sources == ["abs", "b", ".", "."]


MULTI_STAGE = """\
    FROM golang AS build
    ENV CGO=0
    RUN go build
    FROM build AS test
    RUN go test
    FROM alpine
    COPY --from=build /app /app
    COPY --from=nginx:1 /etc/nginx /etc/nginx
    COPY --from=0 /lib /lib
    """


def test_stages_that_are_needed() -> None:
    found = of(MULTI_STAGE)
    assert [stage.name for stage in found.needed()] == ["build", ""]
    copies = [step.action for step in found.target.steps if isinstance(step.action, CopyFiles)]
    assert [(copy.stage, copy.image) for copy in copies] == [(0, None), (None, "nginx:1"), (0, None)]


def test_a_stage_that_begins_with_another_has_its_steps() -> None:
    target = of(MULTI_STAGE, "test").target
    assert (target.image, target.env) == ("golang", {"CGO": "0"})
    assert [step.source for step in target.steps] == ["ENV CGO=0", "RUN go build", "RUN go test"]
    assert of(MULTI_STAGE, "1").target.name == "test"


def test_a_cache_mount_is_warned_of() -> None:
    found = of("FROM a\nRUN --mount=type=cache,target=/x make")
    assert [step.action for step in found.target.steps] == [sh("make")]
    assert found.warnings == ("line 2: the cache of --mount is not kept between builds.",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: there is no FROM"),
        ("RUN x", "line 1: RUN comes before the first FROM"),
        ("FROM scratch", "line 1: FROM scratch is not supported"),
        ("FROM a b", "line 1: FROM is not of the form"),
        ("FROM $X", "line 1: FROM \\$X names no image"),
        ("FROM --platform=linux/arm64 a", "line 1: FROM --platform=linux/arm64 is not supported"),
        ("FROM a\n\nFOO x", "line 3: FOO is not an instruction"),
        ("FROM a\nRUN", "line 2: RUN needs arguments"),
        ("FROM a\nONBUILD RUN x", "line 2: ONBUILD is not supported"),
        ("FROM a\nHEALTHCHECK NONE", "line 2: HEALTHCHECK is not supported"),
        ("FROM a\nSTOPSIGNAL 9", "line 2: STOPSIGNAL is not supported"),
        ("FROM a\nRUN --mount=type=secret,id=x y", "line 2: RUN --mount=type=secret,id=x is not supported"),
        ("FROM a\nRUN --network=none y", "line 2: RUN --network is not supported"),
        ("FROM a\nCOPY x", "line 2: COPY needs a source and a destination"),
        ("FROM a\nCOPY --parents x y", "line 2: COPY --parents is not supported"),
        ("FROM a\nCOPY x y z", "line 2: the destination of several files must end with /"),
        ("FROM a\nCOPY ../x y", "line 2: ../x is outside of the build context"),
        ("FROM a\nCOPY --chmod=u+x x y", "line 2: --chmod=u\\+x is not an octal mode"),
        ("FROM a\nCOPY --chown=a:b:c x y", "line 2: --chown=a:b:c is not user or user:group"),
        ("FROM a AS me\nCOPY --from=me x y", "line 2: a stage cannot copy from itself"),
        ("FROM a\nADD git@host:x.git /y", "line 2: ADD of a git repository is not supported"),
        ("FROM a\nADD https://host/x y /z/", "line 2: ADD mixes files with URLs"),
        ("FROM a\nENV 1=x", "line 2: ENV: '1' cannot be the name"),
        ("FROM a\nARG a-b", "line 2: ARG: 'a-b' cannot be the name"),
        ("FROM a\nENV A='x", "line 2: ENV: a ' is not closed"),
        ("FROM a\nEXPOSE http", "line 2: EXPOSE http is not a port"),
        ("FROM a\nEXPOSE 99999", "line 2: EXPOSE 99999 is not a port"),
        ("FROM a\nSHELL bash", "line 2: SHELL is not a list"),
        ("FROM a\nUSER a b", "line 2: 'a b' is not a user"),
        ("FROM a\nCOPY $X y", "line 2: COPY: \\$X is not known here"),
    ],
)
def test_what_is_not_supported_names_its_line(content: str, message: str) -> None:
    with pytest.raises(DockerfileError, match=message):
        of(content)


def test_a_stage_that_does_not_exist() -> None:
    with pytest.raises(DockerfileError, match="there is no stage 'x'") as caught:
        of(MULTI_STAGE, "x")
    assert caught.value.hint == "The stages are build, test, 2."
