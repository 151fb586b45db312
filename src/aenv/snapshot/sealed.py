"""Small JSON documents that carry the digest of their own bytes, so that a flipped bit is never believed.

A document is ``{"sha256":"<64 hex>","body":<JSON>}``, without white space around ``body``. The digest is over the
bytes of the body, exactly as they stand in the file. Any JSON tool reads it; ours also knows whether it is whole.
"""

import hashlib

from aenv.errors import CorruptFileError

_HEAD = b'{"sha256":"'
_MIDDLE = b'","body":'
_BODY = len(_HEAD) + 64 + len(_MIDDLE)


def seal(body: bytes) -> bytes:
    """The document of ``body``, which is JSON."""
    return b"".join((_HEAD, hashlib.sha256(body).hexdigest().encode(), _MIDDLE, body, b"}"))


def unseal(data: bytes, name: str) -> bytes:
    """The body of a document. Raises CorruptFileError, with ``name`` in it, unless every byte is as written."""
    body = data[_BODY:-1]
    if data != seal(body):
        raise CorruptFileError(
            f"{name} is torn, foreign or damaged: its checksum does not match.",
            "Check what stores it (aenv-store verify), and restore it from a copy.",
        )
    return body
