"""The Host header that servers see."""

import pytest

from aenv.proxy.masking import masked


@pytest.mark.parametrize(
    ("mask", "host"),
    [("localhost:${PORT}", b"localhost:3000"), ("app.test", b"app.test"), ("${PORT}-${PORT}", b"3000-3000")],
)
def test_the_host_is_replaced_and_passed_on(mask: str, host: bytes) -> None:
    headers = [(b"accept", b"*/*"), (b"host", b"3000-i1.sandbox.test"), (b"cookie", b"a"), (b"cookie", b"b")]
    assert masked(headers, mask, 3000) == [
        (b"host", host),
        (b"accept", b"*/*"),
        (b"cookie", b"a"),
        (b"cookie", b"b"),
        (b"x-forwarded-host", b"3000-i1.sandbox.test"),
    ]


def test_an_outer_proxy_knows_better() -> None:
    headers = [(b"host", b"inner"), (b"x-forwarded-host", b"outer")]
    assert masked(headers, "localhost", 1) == [(b"host", b"localhost"), (b"x-forwarded-host", b"outer")]
    assert masked([], "localhost", 1) == [(b"host", b"localhost")]
