"""What a Dockerfile asks for, as steps of template builds: one build for each stage that is needed. Pure.

A stage that begins with another stage has that one's steps first. As whom and where the steps begin is the server's
business, which knows the image: ``aenv.template.context.of_dockerfile``.
"""

import posixpath
import re
import shlex
from collections.abc import Callable, Mapping

from aenv.template import dockerfile_words as words
from aenv.template.dockerfile import Dockerfile, DockerfileError, Instruction, heredoc_marks
from aenv.template.dockerfile_model import CopyFiles, InlineFile, Plan, Stage, Step
from aenv.template.dockerfile_words import Scope, WordError
from aenv.template.steps import Env, Run, User, Workdir

PLATFORMS = frozenset({"linux/amd64", "linux/x86_64", "amd64"})  # of the machines that sandboxes are
# Arguments that exist without ARG: https://docs.docker.com/reference/dockerfile/#predefined-args
PLATFORM_ARGS = {
    "TARGETPLATFORM": "linux/amd64", "TARGETOS": "linux", "TARGETARCH": "amd64", "TARGETVARIANT": "",
    "BUILDPLATFORM": "linux/amd64", "BUILDOS": "linux", "BUILDARCH": "amd64", "BUILDVARIANT": "",
}  # fmt: skip
PROXY_ARGS = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_MODE = re.compile(r"0?[0-7]{3,4}")
_GIT = re.compile(r"(git@|git://|ssh://|https?://.*\.git(#.*)?$)")
_UNSUPPORTED = {
    "ONBUILD": "Put the instruction into the Dockerfiles that are built on this one.",
    "HEALTHCHECK": "Remove it; --ready and --ready-port say when a start command is ready.",
    "STOPSIGNAL": "Remove it; sandboxes are paused or deleted as a whole.",
}
_FLAGS: Mapping[str, frozenset[str]] = {
    "FROM": frozenset({"platform"}),
    "RUN": frozenset({"mount"}),
    "COPY": frozenset({"from", "chown", "chmod", "link"}),
    "ADD": frozenset({"chown", "chmod", "link", "checksum"}),
}


def plan(dockerfile: Dockerfile, arguments: Mapping[str, str], target: str | None = None) -> Plan:
    """Raises DockerfileError that names the line; InvalidRequestError's other kinds do not come from here.

    ``arguments`` are the values given for ARG, ``target`` the name or index of the stage that is wanted.
    """
    reader = _Reader(dockerfile.escape, arguments)
    for instruction in dockerfile.instructions:
        try:
            reader.read(instruction)
        except WordError as error:
            raise DockerfileError(instruction.line, f"{instruction.name}: {error}.") from None
    if not reader.stages:
        raise DockerfileError(1, "there is no FROM.", "A Dockerfile begins with the image that it builds on.")
    return Plan(tuple(reader.stages), reader.find_target(target), tuple(reader.warnings))


class _Reader:
    """Reads instructions one after the other."""

    def __init__(self, escape: str, arguments: Mapping[str, str]) -> None:
        self.stages: list[Stage] = []
        self.warnings: list[str] = []
        self._escape = escape
        self._given = arguments
        self._global_args: dict[str, str] = {}
        self._args: dict[str, str] = {}  # of the current stage
        self._readers: dict[str, Callable[[Instruction], None]] = {
            "FROM": self._from, "ARG": self._arg, "ENV": self._env, "RUN": self._run, "COPY": self._copy,
            "ADD": self._copy, "WORKDIR": self._workdir, "USER": self._user, "SHELL": self._shell, "CMD": self._cmd,
            "ENTRYPOINT": self._entrypoint, "EXPOSE": self._expose, "VOLUME": self._volume, "LABEL": self._label,
            "MAINTAINER": self._maintainer,
        }  # fmt: skip

    def read(self, instruction: Instruction) -> None:
        name = instruction.name
        if name in _UNSUPPORTED:
            raise DockerfileError(instruction.line, f"{name} is not supported.", _UNSUPPORTED[name])
        if name not in self._readers:
            raise DockerfileError(instruction.line, f"{name[:40]} is not an instruction.")
        if not self.stages and name not in ("FROM", "ARG"):
            raise DockerfileError(instruction.line, f"{name} comes before the first FROM.")
        for flag, _ in instruction.flags:
            if flag not in _FLAGS.get(name, ()):
                raise DockerfileError(instruction.line, f"{name} --{flag} is not supported.")
        if not instruction.text:
            raise DockerfileError(instruction.line, f"{name} needs arguments.")
        self._readers[name](instruction)

    def find_target(self, name: str | None) -> Stage:
        found = self.stages[-1] if name is None else self._stage(name)
        if found is None:
            names = ", ".join(stage.name or str(stage.index) for stage in self.stages)
            raise DockerfileError(1, f"there is no stage {name!r}.", f"The stages are {names}.")
        return found

    # -- words

    @property
    def _now(self) -> Stage:
        return self.stages[-1]

    def _scope(self) -> Scope:
        return Scope({**PLATFORM_ARGS, **self._args, **self._now.env} if self.stages else self._global_args)

    def _literal(self, word: str) -> str:
        return words.literal(word, self._scope(), self._escape)

    def _template(self, word: str) -> str:
        return words.template(word, self._scope(), self._escape)

    def _split(self, text: str) -> list[str]:
        return words.split(text, self._escape)

    def _add(self, instruction: Instruction, action: Run | Env | Workdir | User | CopyFiles) -> None:
        self._now.steps.append(Step(instruction.line, instruction.source, action))

    def _pairs(self, text: str) -> list[tuple[str, str]]:
        """``NAME=value …``, or the old ``NAME value``; values are words as they were written."""
        parts = self._split(text)
        if "=" not in parts[0]:
            name, _, value = text.partition(" ")
            return [(name, value.strip())]
        return [(name, value) for name, _, value in (part.partition("=") for part in parts)]

    # -- instructions

    def _from(self, instruction: Instruction) -> None:
        parts = instruction.text.split()
        if len(parts) not in (1, 3) or (len(parts) == 3 and parts[1].lower() != "as"):
            hint = "FROM base begins with the server's base template." if parts[:1] == ["template"] else ""
            raise DockerfileError(instruction.line, "FROM is not of the form IMAGE [AS NAME].", hint)
        scope = Scope({**PLATFORM_ARGS, **self._global_args}, closed=True)
        for _, value in instruction.flags:
            platform = words.literal(value or "", scope, self._escape)
            if platform not in PLATFORMS:
                raise DockerfileError(
                    instruction.line, f"FROM --platform={platform} is not supported.", "Sandboxes are linux/amd64."
                )
        base = words.literal(parts[0], scope, self._escape)
        if not base:
            raise DockerfileError(instruction.line, f"FROM {parts[0]} names no image: its variable is not set.")
        if base == "scratch":
            raise DockerfileError(
                instruction.line,
                "FROM scratch is not supported.",
                "A sandbox needs a root file system with a shell: begin with a small image, such as alpine.",
            )
        parent = self._stage(base)
        name = parts[2].lower() if len(parts) == 3 else ""
        index = len(self.stages)
        if parent is None:
            self.stages.append(Stage(index, name, instruction.line, base))
        else:
            self.stages.append(parent.child(index, name, instruction.line))
        self._args = {}

    def _stage(self, name: str) -> Stage | None:
        for stage in reversed(self.stages):
            if stage.name == name.lower() and stage.name:
                return stage
        return self.stages[int(name)] if name.isdecimal() and int(name) < len(self.stages) else None

    def _arg(self, instruction: Instruction) -> None:
        target = self._args if self.stages else self._global_args
        for part in self._split(instruction.text):
            name, equals, default = part.partition("=")
            if not _VARIABLE.fullmatch(name):
                raise DockerfileError(instruction.line, f"ARG: {name!r} cannot be the name of a variable.")
            if name in self._given:
                target[name] = self._given[name]
            elif equals:
                target[name] = self._literal(default)
            elif self.stages and name in self._global_args:
                target[name] = self._global_args[name]

    def _env(self, instruction: Instruction) -> None:
        pairs, known = [], {}
        for name, word in self._pairs(instruction.text):
            if not _VARIABLE.fullmatch(name):
                raise DockerfileError(instruction.line, f"ENV: {name!r} cannot be the name of a variable.")
            pairs.append((name, self._template(word)))
            try:
                known[name] = self._literal(word)
            except WordError:  # it has a variable of the base image
                self._args.pop(name, None)
                self._now.env.pop(name, None)
        self._now.env.update(known)
        self._add(instruction, Env(tuple(pairs)))

    def _run(self, instruction: Instruction) -> None:
        for name, value in instruction.flags:
            kind = dict(part.partition("=")[::2] for part in (value or "").split(",")).get("type", "bind")
            if name != "mount" or kind != "cache":
                raise DockerfileError(
                    instruction.line,
                    f"RUN --{name}={value} is not supported.",
                    "COPY the files, or pass values with --build-arg.",
                )
            self.warnings.append(f"line {instruction.line}: the cache of --mount is not kept between builds.")
        self._add(instruction, Run(self._arguments_prefix() + self._command(instruction), None))

    def _arguments_prefix(self) -> str:
        """ARGs are variables of RUN, where ENV does not set the same name."""
        proxies = {name: value for name, value in self._given.items() if name.upper() in PROXY_ARGS}
        args = {name: value for name, value in {**proxies, **self._args}.items() if name not in self._now.env}
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(args.items()))

    def _command(self, instruction: Instruction) -> str:
        if (argv := instruction.json()) is not None:
            return "exec " + shlex.join(argv)
        text, documents = instruction.text, instruction.heredocs
        if len(documents) == 1 and heredoc_marks(text)[0][0] == text:
            text = documents[0].content
            if text.startswith("#!"):
                return _script(text)
        else:
            text += "".join(f"\n{document.content}{document.name}" for document in documents)
        return self._in_shell(text)

    def _in_shell(self, text: str) -> str:
        return "exec " + shlex.join([*self._now.shell, text])

    def _copy(self, instruction: Instruction) -> None:
        add, flags = instruction.name == "ADD", dict(instruction.flags)
        parts = instruction.json()
        if parts is None:
            parts = self._split(instruction.text)
        if len(parts) < 2:
            raise DockerfileError(instruction.line, f"{instruction.name} needs a source and a destination.")
        destination, marks = self._template(parts[-1]), len(heredoc_marks(instruction.text))
        inline = tuple(
            InlineFile(item.name, self._expanded(item.content) if item.expand else item.content)
            for item in instruction.heredocs
        )
        sources = [
            self._literal(part) for part in parts[:-1] if not (marks and part.lstrip("0123456789")[:2] == "<<")
        ]
        urls = tuple(source for source in sources if add and source.startswith(("http://", "https://")))
        for source in sources:
            if add and _GIT.match(source):
                raise DockerfileError(
                    instruction.line, "ADD of a git repository is not supported.", "RUN git clone does the same."
                )
        if (urls or inline) and len(urls) < len(sources):
            raise DockerfileError(instruction.line, f"{instruction.name} mixes files with URLs or here-documents.",
                                  "Use an instruction for each.")  # fmt: skip
        if len(sources) + len(inline) > 1 and not destination.endswith("/"):
            raise DockerfileError(instruction.line, "the destination of several files must end with /.")
        owner, mode = self._flag(flags, "chown"), self._flag(flags, "chmod")
        if owner and not _OWNER.fullmatch(owner):
            raise DockerfileError(instruction.line, f"--chown={owner} is not user or user:group.")
        if mode and not _MODE.fullmatch(mode):
            raise DockerfileError(instruction.line, f"--chmod={mode} is not an octal mode such as 755.")
        place = self._flag(flags, "from")
        stage = None if not place else self._stage(place)
        if stage is self._now:
            raise DockerfileError(instruction.line, f"a stage cannot copy from itself ({place}).")
        action = CopyFiles(
            () if urls else tuple(self._source(instruction, source, bool(place)) for source in sources),
            destination,
            owner or "root:root",
            mode,
            stage=None if stage is None else stage.index,
            image=place if place and stage is None else None,
            inline=inline,
            urls=urls,
            unpack=add,
            checksum=self._flag(flags, "checksum"),
        )
        self._add(instruction, action)

    def _flag(self, flags: Mapping[str, str | None], name: str) -> str:
        return self._literal(flags.get(name) or "")

    def _expanded(self, content: str) -> str:
        """A here-document: quotes are ordinary in it."""
        return self._literal('"' + content.replace('"', f'{self._escape}"') + '"')

    def _source(self, instruction: Instruction, text: str, remote: bool) -> str:
        """Relative to the context, or to the root of another stage; ``.`` for that itself."""
        path = posixpath.normpath("/" + text).lstrip("/") or "."
        if not remote and posixpath.normpath(text.lstrip("/")).startswith("../"):
            raise DockerfileError(instruction.line, f"{text} is outside of the build context.",
                                  "Choose a folder that has all files with --context.")  # fmt: skip
        return path

    def _workdir(self, instruction: Instruction) -> None:
        self._add(instruction, Workdir(self._template(instruction.text)))

    def _user(self, instruction: Instruction) -> None:
        name = self._literal(instruction.text)
        if not _OWNER.fullmatch(name):
            raise DockerfileError(instruction.line, f"{name!r} is not a user.")
        user, _, group = name.partition(":")
        if group:
            self.warnings.append(f"line {instruction.line}: the group is the user's own, not {group}.")
        self._add(instruction, User(user))

    def _shell(self, instruction: Instruction) -> None:
        argv = instruction.json()
        if not argv:
            raise DockerfileError(instruction.line, 'SHELL is not a list such as ["/bin/bash", "-c"].')
        self._now.shell = tuple(argv)

    def _cmd(self, instruction: Instruction) -> None:
        argv = instruction.json()
        self._now.command = shlex.join([*self._now.shell, instruction.text] if argv is None else argv)
        self._now.own_command = True

    def _entrypoint(self, instruction: Instruction) -> None:
        argv = instruction.json()
        self._now.entrypoint = shlex.join([*self._now.shell, instruction.text] if argv is None else argv)
        self._now.entrypoint_alone = argv is None
        self._now.has_entrypoint = True
        if not self._now.own_command:  # Docker's rule: an inherited CMD is not for another ENTRYPOINT
            self._now.command = ""

    def _expose(self, instruction: Instruction) -> None:
        for word in self._split(instruction.text):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?(?:/(tcp|udp))?", self._literal(word))
            if match is None or not 0 < int(match[1]) < 65536:
                raise DockerfileError(instruction.line, f"EXPOSE {word} is not a port such as 8080 or 53/udp.")
            if match[3] != "udp":
                self._now.ports.append(int(match[1]))

    def _volume(self, instruction: Instruction) -> None:
        """A volume without a host behind it is a folder."""
        paths = instruction.json()
        if paths is None:
            paths = [self._literal(word) for word in self._split(instruction.text)]
        self._add(instruction, Run("exec " + shlex.join(["mkdir", "-p", "--", *paths]), "root"))

    def _label(self, instruction: Instruction) -> None:
        """Checked. A template has no place for labels, and nothing in a sandbox sees them."""
        for _, word in self._pairs(instruction.text):
            self._template(word)

    def _maintainer(self, instruction: Instruction) -> None:
        """A label of old."""


def _script(text: str) -> str:
    """Run a program that is written out, with the interpreter that its first line names."""
    return (
        "script=$(mktemp) || exit 1\n"
        f'printf %s {shlex.quote(text)} > "$script" && chmod 755 "$script" || exit 1\n'
        '"$script"; code=$?; rm -f "$script"; exit $code'
    )
