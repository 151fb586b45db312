"""What steps of a build run with: environment, user, working directory. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aenv.template.expand import expand

DEFAULT_USER = "user"
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
    """Where a build from an image starts.

    As in E2B, commands run as ``user`` in its home by default, where Docker's are root and ``/``: only what the image
    sets otherwise is taken over.
    """
    name = user.partition(":")[0]
    return Context(
        env=dict(env),
        user=name if name not in ("", "root", "0") else DEFAULT_USER,
        workdir=workdir if workdir not in ("", "/") else None,
    )
