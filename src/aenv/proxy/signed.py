"""Which sandbox a signed file URL belongs to. Pure.

With ``E2B_SANDBOX_URL`` set, the URLs that E2B's SDKs sign (``download_url``, ``upload_url``) name no sandbox:
``{url}/files?path=...&signature=...``. But the signature is a hash over the path, the operation, the user and the
sandbox's envd access token, 256 random bits of its own, so only the sandbox whose token it was made with can be
meant. envd checks the signature, and its expiration, again.

``signature = "v1_" + base64(sha256("path:operation:user:token[:expiration]"))`` without padding (e2b 2.63,
``sandbox/signature.py``).
"""

import base64
import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import parse_qs

FILES_PATH = b"/files"
_OPERATIONS = {"GET": "read", "HEAD": "read", "POST": "write"}


@dataclass(frozen=True, slots=True)
class SignedRequest:
    path: str
    operation: str
    user: str
    expiration: str | None
    signature: str

    def signed_with(self, token: str) -> bool:
        text = f"{self.path}:{self.operation}:{self.user}:{token}"
        if self.expiration is not None:
            text += f":{self.expiration}"
        wanted = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        return hmac.compare_digest(b"v1_" + wanted, self.signature.encode())


def parse(method: str, raw_path: bytes, query: bytes) -> SignedRequest | None:
    """The signed request in a method, path and query string; None for everything else."""
    operation = _OPERATIONS.get(method)
    if operation is None or raw_path.partition(b"?")[0] != FILES_PATH or b"signature=" not in query:
        return None
    try:
        fields = parse_qs(query.decode("ascii"), keep_blank_values=True, max_num_fields=20, errors="strict")
    except ValueError:  # not ASCII, not UTF-8, or too many fields
        return None
    signature = fields.get("signature", [""])[0]
    if not signature:
        return None
    return SignedRequest(
        path=fields.get("path", [""])[0],
        operation=operation,
        user=fields.get("username", [""])[0],
        expiration=fields.get("signature_expiration", [None])[0],
        signature=signature,
    )
