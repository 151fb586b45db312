"""The node's API key: generated on first start, readable by its owner alone.

Further keys are made through the API and kept as hashes: ``aenv.accounts.credentials``.
"""

import os
import secrets
from pathlib import Path

from aenv.errors import CorruptFileError


def new_api_key() -> str:
    """A key in the form that E2B's tools accept: ``e2b_`` and 40 hexadecimal digits."""
    return "e2b_" + secrets.token_hex(20)


def load_or_create(path: Path) -> str:
    """The key in ``path``; made there (mode 0600) if it does not exist. Raises CorruptFileError when empty."""
    try:
        key = path.read_text().strip()
    except FileNotFoundError:
        key = new_api_key()
        part = path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    if not key:
        raise CorruptFileError(f"{path} is empty.", "Remove it to have a new key made, or write one into it.")
    return key
