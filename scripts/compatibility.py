#!/usr/bin/env python3
"""Print docs/reference/compatibility.md from JUnit reports of the tests that carry ``compat`` markers.

pytest tests/node --junitxml=report.xml
scripts/compatibility.py report.xml... > docs/reference/compatibility.md

A test that is in several reports counts as in the last of them.

A cell says what the tests saw: a feature whose tests passed works, differs or is refused as the marker says, and
one with a failed test is said to fail. Where there is no test the cell is empty: nothing is claimed.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from importlib.metadata import version
from json import loads
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENTS = ("Python, sync", "Python, async", "JavaScript", "CLI")

# How a feature differs or why it is refused. Every feature with such a verdict must be here.
NOTES = {
    "network rules by domain": "400. Traffic is filtered by address: use CIDR blocks.",
    "secrets": "Stored with versions and metadata; values never come back. Nothing gives them to sandboxes: rules of "
    "`network` that would are refused.",
    "volume mounts": "501. QEMU's microvm machine has no hot plug, so a restored machine gets no further disks. What "
    "is in a volume is read and written with the SDK's `Volume`.",
}

RANK = {"works": 0, "differs": 1, "refused": 2, "fails": 3}

HEAD = """# Compatibility with E2B

<!-- Printed by scripts/compatibility.py from the report of a test run. Do not edit: run it again. -->

What the official clients, unchanged, do on this server: e2b {python} for Python, e2b {javascript} and
@e2b/cli {cli} for JavaScript. Each cell is the outcome of tests on real microVMs ({count} of them); an empty one
means that no test has looked.

| feature | {clients} |
|---|{dashes}|
"""

TAIL = """
## Differences by design

- A sandbox that reaches the end of its time to live is **paused** unless it was created to be killed
  (`lifecycle: {"on_timeout": "kill"}`); E2B kills by default.
- One node has one team. Every valid key may do everything; `GET /teams` returns the key that asked.
- Metrics of the last hour are kept in memory: after a restart of the server they begin anew.
- Logs are the sandbox's life and its console; what commands print goes to who runs them. Each sandbox keeps its
  latest 2000 entries, and the last 1000 sandboxes that ended keep theirs.
- The content of volumes is served by the node: set `E2B_VOLUME_API_URL` to its address.
- A build from a saved snapshot goes on from its files, not from its processes.
- An `Idempotency-Key` holds as long as the sandbox that it made.
- Signed file URLs also work where `E2B_SANDBOX_URL` makes them name no sandbox: the signature tells which.

## Refused

What this server does not have is refused with 501, or 400 for a single option of a call, and `error_code:
not_supported`; it is never ignored. Beside what the table says:

- `mcp`, `iam` and `customExtensionParams` of a new sandbox;
- changing a node's status, metrics of teams, E2B's administration endpoints.
"""


def read(reports: list[Path]) -> tuple[dict[str, dict[str, str]], int]:
    """Feature to client to verdict, and the number of tests."""
    table: dict[str, dict[str, str]] = defaultdict(dict)
    count = 0
    latest = {
        (test.get("classname"), test.get("name")): test
        for report in reports
        for test in ElementTree.parse(report).iter("testcase")
    }
    for test in latest.values():
        for found in test.iter("property"):
            if found.get("name") != "compat":
                continue
            client, feature, verdict = (found.get("value") or "").split("|")
            if test.find("skipped") is not None:
                continue
            count += 1
            if test.find("failure") is not None or test.find("error") is not None:
                verdict = "fails"
            before = table[feature].get(client, "works")
            table[feature][client] = max(before, verdict, key=RANK.__getitem__)
    return dict(table), count


def render(table: dict[str, dict[str, str]], count: int) -> str:
    """Raises SystemExit for a client that is not known or a difference without a note."""
    unknown = {client for row in table.values() for client in row} - set(CLIENTS)
    silent = [f for f, row in table.items() if {"differs", "refused"} & set(row.values()) and f not in NOTES]
    if unknown or silent:
        raise SystemExit(f"unknown clients: {sorted(unknown)}; features without a note: {sorted(silent)}")
    packages = loads((ROOT / "tests/js/package.json").read_text())["dependencies"]
    text = HEAD.format(
        python=version("e2b"),
        javascript=packages["e2b"],
        cli=packages["@e2b/cli"],
        count=count,
        clients=" | ".join(CLIENTS),
        dashes="|".join("---" for _ in CLIENTS),
    )
    for feature in sorted(table):
        cells = (table[feature].get(client, "") for client in CLIENTS)
        text += f"| {feature} | {' | '.join(cells)} |\n"
    noted = [feature for feature in sorted(table) if {"differs", "refused"} & set(table[feature].values())]
    text += "\n" + "\n".join(f"- **{feature}**: {NOTES[feature]}" for feature in noted) + "\n"
    return text + TAIL


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    print(render(*read([Path(name) for name in sys.argv[1:]])), end="")
