"""What of the checkout goes into the lab."""

import subprocess
from pathlib import Path

from lab.settings import BUILT


def listing(root: Path) -> list[str]:
    """Files of the checkout that exist: tracked, new and not ignored, built programs, and compiled modules.

    The compiled ones (``__pycache__``) are good in the lab because files keep their times and the Pythons are of one
    version; without them the first import of the server takes half a minute there.
    """
    output = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    names = dict.fromkeys(name for name in output.split("\0") if name)
    compiled = (path for top in ("src", "tests", "bench", "lab") for path in (root / top).rglob("__pycache__/*.pyc"))
    names |= dict.fromkeys(str(path.relative_to(root)) for path in compiled)
    names |= dict.fromkeys(map(str, BUILT))
    return [name for name in names if (root / name).is_file() or (root / name).is_symlink()]
