"""Finding a sandbox by the signature of a file URL, against the SDK's own signing."""

from urllib.parse import quote

import pytest
from e2b.sandbox.signature import get_signature

from aenv.proxy.signed import parse

TOKEN = "t" * 43


def query(path: str, operation: str, user: str | None = None, expiration: int | None = None) -> bytes:
    made = get_signature(path, operation, user, TOKEN, expiration)  # type: ignore[arg-type]
    text = f"path={quote(path)}&signature={quote(made['signature'])}"
    text += f"&username={user}" if user else ""
    text += f"&signature_expiration={made['expiration']}" if made["expiration"] else ""
    return text.encode()


@pytest.mark.parametrize("path", ["a", "/etc/hostname", "grüße und +/=&", ""])
@pytest.mark.parametrize("user", [None, "root"])
@pytest.mark.parametrize("expiration", [None, 60])
def test_the_sdks_signatures_are_recognised(path: str, user: str | None, expiration: int | None) -> None:
    for method, operation in (("GET", "read"), ("POST", "write")):
        request = parse(method, b"/files", query(path, operation, user, expiration))
        assert request is not None
        assert request.signed_with(TOKEN)
        assert not request.signed_with(TOKEN + "x")


def test_changed_requests_are_nobodys() -> None:
    good = query("a", "read")
    for method, changed in (
        ("POST", good),
        ("GET", good.replace(b"path=a", b"path=b")),
        ("GET", good + b"&username=root"),
        ("GET", good + b"&signature_expiration=9999999999"),
    ):
        request = parse(method, b"/files", changed)
        assert request is not None
        assert not request.signed_with(TOKEN)


@pytest.mark.parametrize(
    ("method", "path", "text"),
    [
        ("GET", b"/file", b"signature=x"),
        ("GET", b"/files/", b"signature=x"),
        ("DELETE", b"/files", b"signature=x"),
        ("GET", b"/files", b""),
        ("GET", b"/files", b"signature="),
        ("GET", b"/files", b"path=%ff&signature=x"),
        ("GET", b"/files", b"path=\xff&signature=x"),
        ("GET", b"/files", b"&".join([b"signature=x"] * 50)),
    ],
)
def test_everything_else_is_not_signed(method: str, path: bytes, text: bytes) -> None:
    assert parse(method, path, text) is None
