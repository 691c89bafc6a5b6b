"""Format tables as text for a terminal, and as Markdown."""

import unicodedata

from apical.bench.tables import Table


def format_text(table: Table) -> str:
    """Return a table with lines around it. The first column is left-aligned, the others right-aligned.

    >>> print(format_text(Table("t", ["a", "b"], [["x", "10"]])))
    t
    ┌───┬────┐
    │ a │  b │
    ├───┼────┤
    │ x │ 10 │
    └───┴────┘
    """
    lines = [table.headings, *table.rows]
    widths = [max(measure_width(row[k]) for row in lines) for k in range(len(table.headings))]
    top, middle, bottom = (
        left + cross.join("─" * (w + 2) for w in widths) + right for left, cross, right in ("┌┬┐", "├┼┤", "└┴┘")
    )
    body = [_format_row(row, widths) for row in lines]
    return "\n".join([table.title, top, body[0], middle, *body[1:], bottom, *table.notes])


def measure_width(cell: str) -> int:
    """Return the width of a text in a terminal. Combining characters have no width."""
    return sum(not unicodedata.combining(character) for character in cell)


def _format_row(row: list[str], widths: list[int]) -> str:
    """Return one line of a table."""
    padded = [
        cell + " " * (w - measure_width(cell)) if k == 0 else " " * (w - measure_width(cell)) + cell
        for k, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]
    return f"│ {' │ '.join(padded)} │"


def format_markdown(table: Table) -> str:
    """Return a table as Markdown, under a heading."""
    return "\n".join([f"## {table.title}", "", *format_markdown_rows(table), "", *table.notes])


def format_markdown_rows(table: Table) -> list[str]:
    """Return the lines of a Markdown table without heading and notes."""
    lines = [table.headings, ["---"] * len(table.headings), *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines]
