"""What steps of a build run with: environment, user, working directory. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aenv.image.defaults import DEFAULT_USER, default_user, default_workdir
from aenv.template.expand import expand

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
