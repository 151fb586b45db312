"""Where registries send those who ask for blobs, as long as that holds. Pure.

Registries keep blobs in object stores or behind delivery networks, and answer each request with a redirection to an
address that is signed for some time. Reading an image on demand is many requests for parts of few blobs.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlsplit

MARGIN = 15.0  # seconds before its end in which an address is not used any more: clocks differ, reads take time
UNKNOWN = 60.0  # seconds for which one is used that does not say how long it holds
LONGEST = 6 * 3600.0
MOST = 4096  # addresses that are remembered
_SIGNED = (("X-Amz-Date", "X-Amz-Expires"), ("X-Goog-Date", "X-Goog-Expires"))  # S3 and its kin, Google
_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=(\d+)")

Key = tuple[str, str, str]  # registry, repository, digest


def lifetime(url: str, headers: Mapping[str, str], now: float) -> float:
    """Seconds for which ``url`` may be used again; ``headers`` are those of the redirection. ``now``: since 1970."""
    query, ends = dict(parse_qsl(urlsplit(url).query)), list[float]()
    for date, seconds in _SIGNED:
        begin, length = _time(query.get(date, ""), "%Y%m%dT%H%M%SZ"), query.get(seconds, "")
        if begin is not None and length.isdecimal():
            ends.append(begin + int(length))
    if (text := query.get("Expires", "")).isdecimal():  # CloudFront, older S3
        ends.append(float(text))
    if (end := _time(query.get("se", ""), "%Y-%m-%dT%H:%M:%SZ")) is not None:  # Azure
        ends.append(end)
    control = headers.get("Cache-Control", "").lower()
    if ends:  # the signature's own end is known best
        found = min(ends) - now - MARGIN
    elif (match := _MAX_AGE.search(control)) is not None:
        found = float(match[1]) - MARGIN
    else:
        found = 0.0 if "no-store" in control or "no-cache" in control else UNKNOWN
    return max(0.0, min(found, LONGEST))


def _time(text: str, form: str) -> float | None:
    try:
        return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


class Redirects:
    """``now`` is in seconds since 1970."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, tuple[str, float]] = OrderedDict()

    def find(self, key: Key, now: float) -> str | None:
        known = self._known.get(key)
        if known is None:
            return None
        if known[1] <= now:
            del self._known[key]
            return None
        self._known.move_to_end(key)
        return known[0]

    def note(self, key: Key, asked: str, found: str, headers: Mapping[str, str], now: float) -> None:
        """``asked`` led to ``found``. One within the registry is not remembered: it may want to know who asks."""
        length = lifetime(found, headers, now) if _origin(found) != _origin(asked) else 0.0
        if length <= 0:
            return
        self._known[key] = (found, now + length)
        self._known.move_to_end(key)
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
