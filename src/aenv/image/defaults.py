"""What an image's configuration means for the processes of a sandbox. Pure.

As in E2B, commands run as ``user`` in its home by default, where Docker's are root and ``/``: only what the image
sets otherwise is taken over.
"""

DEFAULT_USER = "user"


def default_user(user: str) -> str:
    """``User`` of a configuration, without its group."""
    name = user.partition(":")[0]
    return name if name not in ("", "root", "0") else DEFAULT_USER


def default_workdir(workdir: str) -> str | None:
    """``WorkingDir`` of a configuration; None is the user's home."""
    return workdir if workdir not in ("", "/") else None
