"""What steps of a build run with: environment, user, working directory. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from aenv.image.defaults import DEFAULT_USER, default_user, default_workdir
from aenv.template.expand import expand
from aenv.template.steps import Step, User, Workdir

# What envd gives a process whose environment has none.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Context:
    """``workdir`` None is the user's home."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = DEFAULT_USER
    workdir: str | None = None

    def with_env(self, variables: tuple[tuple[str, str], ...]) -> "Context":
        """Later variables of one step see the earlier ones' new values."""
        env = dict(self.env)
        for name, value in variables:
            env[name] = expand(value, self._visible(env))
        return replace(self, env=env)

    def expand(self, text: str) -> str:
        return expand(text, self._visible(self.env))

    def _visible(self, env: Mapping[str, str]) -> dict[str, str]:
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        return {"PATH": DEFAULT_PATH, "HOME": home, "USER": self.user, **env}


def of_image(env: Mapping[str, str], user: str, workdir: str) -> Context:
    """Where a build from an image starts: see ``aenv.image.defaults``."""
    return Context(env=dict(env), user=default_user(user), workdir=default_workdir(workdir))


def of_dockerfile(env: Mapping[str, str], user: str, workdir: str) -> Context:
    """Where a Dockerfile's steps start on an image with this configuration: as in Docker, root and ``/`` if it has no
    others."""
    name = user.partition(":")[0]
    return Context(env=dict(env), user=name if name not in ("", "0") else "root", workdir=workdir or "/")


def after_dockerfile(context: Context, began: Context, steps: Sequence[Step]) -> Context:
    """What sandboxes run with: as ``of_image``, but a user or folder that the Dockerfile itself names is kept."""
    user = began.user != "root" or any(isinstance(step.action, User) for step in steps)
    folder = began.workdir != "/" or any(isinstance(step.action, Workdir) for step in steps)
    return replace(context, user=context.user if user else DEFAULT_USER, workdir=context.workdir if folder else None)
