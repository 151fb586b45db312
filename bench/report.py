"""The table that a benchmark prints: our figure, the raw operation's, and their ratio."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)


@dataclass
class Row:
    """One comparison; ``raw`` is None where there is nothing to compare with."""

    name: str
    ours: float
    raw: float | None
    unit: str = "ms"
    note: str = ""


class Report:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        raw = "" if row.raw is None else f"   by hand {row.raw:8.1f} {row.unit}   × {row.ours / row.raw:.2f}"
        console.print(f"  {row.name:<44} {row.ours:8.1f} {row.unit}{raw}   [dim]{row.note}[/]")

    def show(self) -> None:
        table = Table(title="AgentENV beside the raw operation", title_justify="left")
        for name in ("operation", "AgentENV", "by hand", "ratio", "note"):
            table.add_column(name, justify="left" if name in ("operation", "note") else "right")
        for row in self.rows:
            raw = "" if row.raw is None else f"{row.raw:.1f} {row.unit}"
            ratio = "" if row.raw is None else f"{row.ours / row.raw:.2f}"
            table.add_row(row.name, f"{row.ours:.1f} {row.unit}", raw, ratio, row.note)
        console.print(table)
