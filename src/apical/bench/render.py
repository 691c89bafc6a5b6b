"""Tables as text for a terminal, and as Markdown."""

import unicodedata

from apical.bench.tables import Table


def text(table: Table) -> str:
    """A table with lines around it; the first column to the left, the others to the right.

    >>> print(text(Table("t", ["a", "b"], [["x", "10"]])))
    t
    ┌───┬────┐
    │ a │  b │
    ├───┼────┤
    │ x │ 10 │
    └───┴────┘
    """
    lines = [table.headings, *table.rows]
    widths = [max(width(row[k]) for row in lines) for k in range(len(table.headings))]
    top, middle, bottom = (
        left + cross.join("─" * (w + 2) for w in widths) + right
        for left, cross, right in ("┌┬┐", "├┼┤", "└┴┘")
    )
    body = [_line(row, widths) for row in lines]
    return "\n".join([table.title, top, body[0], middle, *body[1:], bottom, *table.notes])


def width(cell: str) -> int:
    """How many places a text takes: marks that stand on a letter take none."""
    return sum(not unicodedata.combining(character) for character in cell)


def _line(row: list[str], widths: list[int]) -> str:
    padded = [
        cell + " " * (w - width(cell)) if k == 0 else " " * (w - width(cell)) + cell
        for k, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]
    return f"│ {' │ '.join(padded)} │"


def markdown(table: Table) -> str:
    """The same as Markdown, under a heading."""
    return "\n".join([f"## {table.title}", "", *markdown_rows(table), "", *table.notes])


def markdown_rows(table: Table) -> list[str]:
    """The lines of the table alone."""
    lines = [table.headings, ["---"] * len(table.headings), *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines]
