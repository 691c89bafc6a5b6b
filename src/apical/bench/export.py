"""Tables as text for a terminal, as Markdown, or as LaTeX for a paper; a store as CSV, JSON or Parquet."""

import csv
import io
import json
import statistics
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apical.bench.cells import (
    HIGHER_IS_BETTER,
    METRICS,
    PROTOCOLS,
    Cell,
    Table,
    average_accuracy,
    choose_metrics,
    compute_std,
    find_rule_judgement,
    group_by,
    list_audit_problems,
    load_cells,
    merge_folds,
)
from apical.bench.declaration import Declaration, Request
from apical.bench.store import Row, Store
from apical.bench.suites import Job, list_jobs, load
from apical.bench.tables import build_listing, format_heading, make_tables
from apical.core.registry import RULES
from apical.errors import ApicalError
from apical.extras import import_extra
from apical.files import replace_atomically
from apical.plausibility.criteria import find_claims
from apical.printing import escape_markdown, make_printable

FORMATS = ("csv", "json", "parquet", "latex", "markdown")
TITLES = {
    **{
        "mnist": "MNIST",
        "fashion_mnist": "FashionMNIST",
        "svhn": "SVHN",
        "cifar10": "CIFAR-10",
        "cifar100": "CIFAR-100",
    },
    **{"tiny_imagenet": "Tiny-ImageNet", "subj": "Subj", "mr": "MR"},
    **{"mlp": "MLP", "cnn": "CNN", "rnn": "RNN", "textcnn": "TextCNN"},
}
"""Data sets and networks as a paper names them."""
ESCAPES = {
    **{c: f"\\{c}" for c in "_%&#${}"},
    **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "Θ": r"$\Theta$"},
    **{"<": "$<$", ">": "$>$", "|": "$|$"},
}
CRITERIA_NOTE = "C1--C3 are measured by \\texttt{apical audit}; in brackets the paper's, where they differ."


def export(store: Store, format: str, request: Request | None = None) -> str | bytes:
    """Return all runs of a store, or those of a request, in one of `FORMATS`."""
    if format not in FORMATS:
        raise ApicalError(f"unknown format {format!r}; {', '.join(FORMATS)} work.")
    jobs = _list_all_jobs(store) if request is None else list_jobs(load(request.suite), request)
    runs = store.runs({job.declaration.key for job in jobs if job.declaration is not None})
    if request is not None and not runs and format != "markdown":  # Markdown tables say "not run"
        raise ApicalError(f"{store.path} holds no run of the suite {request.suite!r}.")
    if format == "latex":
        folds = None if request is None else load(request.suite).folds
        cells = load_cells(jobs, store)
        return format_latex(cells if folds is None else merge_folds(cells, folds))
    if format == "markdown":
        groups = group_by(load_cells(jobs, store), lambda cell: (cell.job.data, cell.job.model))
        made = [build_listing(f"{data}, {model}", own, ()) for (data, model), own in sorted(groups.items())]
        if request is not None:
            made, _ = make_tables(request, store)
        return "\n\n".join(format_markdown(table) for table in made) + "\n"
    rows = [_flatten_run(row, store) for row in runs]
    if format == "json":
        return json.dumps(rows, indent=1) + "\n"
    for row in rows:
        del row["epochs"]
        row["declaration"] = json.dumps(row["declaration"], sort_keys=True)
    return _format_csv(rows) if format == "csv" else _format_parquet(rows)


def write_export(path: Path, content: str | bytes) -> None:
    """Write an export to a file."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _flatten_run(row: Row, store: Store) -> dict[str, Any]:
    """Return a run as a flat dictionary: its settings, its score and its columns. `epochs` is its history.

    Accuracies and error rates are between 0 and 1, as in all files; tables for people have them in percent.
    """
    history, asked = store.history(row), row.declaration.to_dict()
    last = history[-1] if history else {}
    measure = choose_metrics(history, asked["data"])[0]
    score, in_percent = METRICS[measure].read(history, asked["protocol"]), measure in ("accuracy", "error")
    apart = ("id", "declaration", "owner", "heartbeat", "seed", "status", "epochs")
    lasts = ("epoch", "loss", "accuracy", "test_loss", "test_accuracy", "test_mse", "test_mae")
    return {
        **{name: asked[name] for name in ("rule", "model", "data")},
        "seed": row.seed,
        "status": row.status,
        "old": row.old,
        "measure": measure,
        "score": None if score is None or row.status != "done" else score / (100 if in_percent else 1),
        **{f"last_{name}": last.get(name) for name in lasts},
        **{name: value for name, value in row.__dict__.items() if name not in apart},
        "seconds": row.seconds,
        "declaration": asked,
        "epochs": history,
    }


def _format_csv(table: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else ["rule"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _format_parquet(table: list[dict[str, Any]]) -> bytes:
    arrow = import_extra("pyarrow", "a Parquet file", "parquet")
    parquet = import_extra("pyarrow.parquet", "a Parquet file", "parquet")
    sink = arrow.BufferOutputStream()
    parquet.write_table(arrow.Table.from_pylist(table), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _list_all_jobs(store: Store) -> list[Job]:
    """Return a job for every declaration of a store."""
    by_key = group_by(store.runs(), lambda row: row.key).values()
    jobs = []
    for rows in by_key:
        one = rows[0].declaration
        own = _find_differences(one, [other[0].declaration for other in by_key])
        if one.examples is not None:
            own["examples"] = one.examples
        numbers = tuple(sorted(row.seed for row in rows))
        jobs.append(Job(one.rule, one.model, one.data, one.epochs, numbers, own, one, None))
    return jobs


def _find_differences(one: Declaration, others: list[Declaration]) -> dict[str, Any]:
    """Return the settings in which a declaration differs from others of the same rule, network and data."""
    alike = [other.to_dict() for other in others if str(other) == str(one)]
    return {name: value for name, value in one.to_dict().items() if any(other.get(name) != value for other in alike)}


# Text and Markdown.


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
    lines = [[make_printable(cell, keep="") for cell in row] for row in (table.headings, *table.rows)]
    widths = [max(map(measure_width, column)) for column in zip(*lines, strict=True)]
    top, middle, bottom = (
        left + cross.join("─" * (w + 2) for w in widths) + right for left, cross, right in ("┌┬┐", "├┼┤", "└┴┘")
    )
    body = []
    for line in lines:
        blanks = [" " * (width - measure_width(cell)) for cell, width in zip(line, widths, strict=True)]
        padded = [line[0] + blanks[0], *(blank + cell for blank, cell in zip(blanks[1:], line[1:], strict=True))]
        body.append(f"│ {' │ '.join(padded)} │")
    title, *notes = (make_printable(text, keep="") for text in (table.title, *table.notes))
    return "\n".join([title, top, body[0], middle, *body[1:], bottom, *notes])


def measure_width(cell: str) -> int:
    """Return the width of a text in a terminal. Combining characters have no width."""
    return sum(not unicodedata.combining(character) for character in cell)


def format_markdown(table: Table) -> str:
    """Return a table as Markdown, under a heading."""
    notes = map(escape_markdown, table.notes)
    return "\n".join([f"## {escape_markdown(table.title)}", "", *format_markdown_rows(table), "", *notes])


def format_markdown_rows(table: Table) -> list[str]:
    """Return the lines of a Markdown table without heading and notes."""
    lines = [table.headings, ["---"] * len(table.headings), *table.rows]
    return ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in lines]


# LaTeX.


def format_latex(cells: list[Cell]) -> str:
    """Return a table as a paper prints it: a block of rules with their criteria for each network, the best in bold."""
    columns = _list_columns(cells)
    averaged = len(columns) > 1 and all(metric == "accuracy" for _, metric in columns)
    heads = [_escape(format_heading(TITLES.get(data, data), metric)) for data, metric in columns]
    heads = ["Method", "C1", "C2", "C3", "Model", *heads, *(["Avg."] if averaged else [])]
    blocks = group_by(cells, lambda cell: cell.job.model).values()
    notes = (CRITERIA_NOTE, *map(_escape, list_audit_problems(cells)))
    return "\n".join(
        [
            "% Mean and standard deviation over seeds; best of each network in bold. Needs",
            "% \\usepackage{amssymb}",
            "% \\usepackage{booktabs}",
            f"\\begin{{tabular}}{{lcccl{'r' * (len(heads) - 5)}}}",
            "\\toprule",
            f"{' & '.join(heads)} \\\\",
            *(line for block in blocks for line in ("\\midrule", *_format_block(block, columns, averaged))),
            "\\bottomrule",
            *(f"\\multicolumn{{{len(heads)}}}{{l}}{{\\footnotesize {note}}} \\\\" for note in notes),
            "\\end{tabular}",
            "",
        ]
    )


Column = tuple[str, str]
"""A data set and a metric."""


def _list_columns(cells: list[Cell]) -> list[Column]:
    """Return each data set with its metrics. Cells without results count only if their data set has no results at all."""
    with_results = {cell.job.data for cell in cells if cell.histories}
    listed = [cell for cell in cells if cell.histories or cell.job.data not in with_results]
    pairs = dict.fromkeys((cell.job.data, metric) for cell in listed for metric in cell.metrics)
    return [(d, metric) for d in dict.fromkeys(cell.job.data for cell in cells) for on, metric in pairs if on == d]


def _format_block(cells: list[Cell], columns: list[Column], averaged: bool) -> list[str]:
    best, model = {column: _find_best(cells, *column) for column in columns}, cells[0].job.model
    body = []
    for (rule, own), line in _label_lines(cells).items():
        name = _escape(find_title(rule) or rule.replace(":", ", ")) + (f" ({_escape(own)})" if own else "")
        scores = [_format_cell(line.get(data), metric, best[data, metric]) for data, metric in columns]
        if averaged:
            mean = average_accuracy(line, [data for data, _ in columns])
            scores.append("--" if mean is None else f"{mean:.2f}")
        marks = _format_criteria(rule, line.values())
        body.append(" & ".join([name, *marks, TITLES.get(model, _escape(model)), *scores]) + " \\\\")
    return body


def _label_lines(cells: list[Cell]) -> dict[tuple[str, str], dict[str, Cell]]:
    """Return the cells of each line by data set. A line is a rule and the settings that tell it from others."""
    lines: dict[tuple[str, str], dict[str, Cell]] = {}
    for alike in group_by(
        cells, lambda cell: (cell.job.rule, cell.job.data, str(cell.job.varied), cell.protocol)
    ).values():
        declared = [cell.job.declaration for cell in alike if cell.job.declaration is not None]
        for cell in alike:
            job = cell.job
            # Blocks of a suite may differ in settings that no block varies.
            named = {**job.varied, **(_find_differences(job.declaration, declared) if job.declaration else {})}
            labels = [f"{name.replace('_', ' ')} {value}" for name, value in named.items()]
            if cell.protocol != "clean" and "protocol" not in named:
                labels.append(PROTOCOLS[cell.protocol])
            lines.setdefault((job.rule, ", ".join(labels)), {})[job.data] = cell
    return lines


def _find_best(cells: list[Cell], data: str, metric: str) -> float | None:
    """Return the best mean on a data set. Quick runs do not count."""
    here = [c for c in cells if c.job.data == data and "examples" not in c.job.varied]
    means = [statistics.fmean(scores.values()) for c in here if (scores := c.scores(metric))]
    return (max if metric in HIGHER_IS_BETTER else min)(means) if means else None


def _format_cell(cell: Cell | None, metric: str, best: float | None) -> str:
    """Return the mean, in bold if it is the best, and the standard deviation if there are several seeds."""
    values = [] if cell is None else list(cell.scores(metric).values())
    if not values:
        return "--"
    digits = METRICS[metric].digits
    mean = statistics.fmean(values)
    text = f"{mean:.{digits}f}"
    text = f"\\textbf{{{text}}}" if mean == best else text
    return text + (f" {{\\scriptsize $\\pm$ {compute_std(values):.{digits}f}}}" if len(values) > 1 else "")


def _format_criteria(rule: str, cells: Iterable[Cell]) -> list[str]:
    """Return the audit's verdicts on the three criteria, with the paper's in brackets where they differ."""
    judgement = find_rule_judgement(rule, cells)
    ours = judgement.criteria
    if ours is None:
        return ["?" if judgement.problem else ""] * 3
    marks = {True: "$\\checkmark$", False: "$\\times$", None: "?"}
    pairs = zip(ours, find_claims(rule) or ours, strict=True)
    return [marks[own] + (f" ({marks[paper]})" if own not in (paper, None) else "") for own, paper in pairs]


def find_title(rule: str) -> str:
    """Return the full name of a rule with its variant, or an empty text for an unknown rule."""
    name, _, variant = rule.partition(":")
    known = RULES[name].TITLE if name in RULES else ""
    return f"{known}, {variant}" if known and variant else known


def _escape(text: str) -> str:
    """Escape the characters that have a meaning in LaTeX."""
    return "".join(ESCAPES.get(c, c) for c in make_printable(text, keep=""))
