"""The machine's apt sources, read so that a guest's distribution comes from where the machine's own does.

Formats: sources.list(5). Only the distribution's own suites of the wanted release are kept: what an administrator
added for the host (third-party repositories, backports) is no business of a guest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

APT = Path("/etc/apt")


@dataclass(frozen=True)
class Source:
    """One repository. ``signed_by`` is a keyring's path, or empty for apt's own trusted keys."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""

    def deb822(self) -> str:
        """The stanza of a ``.sources`` file."""
        lines = [
            "Types: deb",
            f"URIs: {' '.join(self.uris)}",
            f"Suites: {' '.join(self.suites)}",
            f"Components: {' '.join(self.components)}",
        ]
        if self.signed_by:
            lines.append(f"Signed-By: {self.signed_by}")
        return "\n".join(lines) + "\n"


def parse_deb822(text: str) -> list[Source]:
    """The enabled binary repositories of a ``.sources`` file. An embedded key is left out (apt's own are used)."""
    found = []
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields[name] = f"{fields.get(name, '')} {line.strip()}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false"):
            continue
        signed_by = fields.get("signed-by", "")
        found.append(
            Source(
                tuple(fields.get("uris", "").split()),
                tuple(fields.get("suites", "").split()),
                tuple(fields.get("components", "").split()),
                signed_by if signed_by.startswith("/") and " " not in signed_by else "",
            )
        )
    return found


def parse_one_line(text: str) -> list[Source]:
    """The binary repositories of a ``.list`` file."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if match:
            options, uri, suite, components = match.groups()
            signed = re.search(r"signed-by=(\S+)", options or "")
            found.append(Source((uri,), (suite,), tuple(components.split()), signed.group(1) if signed else ""))
    return found


def read_sources(apt: Path = APT) -> list[Source]:
    """Every enabled binary repository of the machine, in apt's order."""
    found = []
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if path.is_file() and path.suffix in (".list", ".sources"):
            text = path.read_text()
            found += parse_deb822(text) if path.suffix == ".sources" else parse_one_line(text)
    return found


def release_sources(sources: list[Source], codename: str) -> list[Source]:
    """What of ``sources`` serves a release: its own suite, its updates and its security fixes."""
    own = {codename, f"{codename}-updates", f"{codename}-security"}
    found = []
    for source in sources:
        suites = tuple(suite for suite in source.suites if suite in own)
        if suites:
            found.append(Source(source.uris, suites, source.components, source.signed_by))
    return found


def without_credentials(source: Source) -> Source:
    """The source as a guest may see it: a user name or password in a URI is the host's secret."""
    uris = []
    for uri in source.uris:
        parts = urlsplit(uri)
        uris.append(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])))
    return Source(tuple(uris), source.suites, source.components, source.signed_by)
