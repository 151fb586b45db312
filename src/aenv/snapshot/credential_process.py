"""Keys of an object store from a command: the AWS CLI's ``credential_process``.

The command prints ``{"Version": 1, "AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"}``, the last two
optional, as documented under "Sourcing credentials with an external process" of the AWS CLI.
"""

import json
import shlex
import subprocess
from datetime import datetime
from typing import TYPE_CHECKING

from aenv.errors import InvalidRequestError, SourceError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_TIMEOUT = 60.0


class CredentialProcess:
    """What obstore asks for keys; it asks again some minutes before they expire."""

    def __init__(self, command: str) -> None:
        """Raises InvalidRequestError when the command cannot be split into words."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InvalidRequestError(f"credential_process is no command: {error}.") from error

    def __call__(self) -> "S3Credential":
        try:
            done = subprocess.run(self._words, capture_output=True, timeout=_TIMEOUT, check=True)
            value = json.loads(done.stdout)
            if value["Version"] != 1:
                raise ValueError(f"version {value['Version']}")
            expires = datetime.fromisoformat(value["Expiration"]) if value.get("Expiration") else None
            return {
                "access_key_id": value["AccessKeyId"],
                "secret_access_key": value["SecretAccessKey"],
                "token": value.get("SessionToken"),
                "expires_at": expires,
            }
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            # Nothing that the command printed: it may hold a secret.
            raise SourceError(
                f"credential_process gave no keys ({type(error).__name__}).", "Run it by hand."
            ) from None
