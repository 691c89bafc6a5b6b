"""Export a store as CSV, JSON or Parquet, and its tables as Markdown or as LaTeX for a paper."""

import csv
import io
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apical.bench import render
from apical.bench.compare import compute_std
from apical.bench.declaration import Declaration
from apical.bench.plan import Plan
from apical.bench.store import Row, Store
from apical.bench.suites import Job
from apical.bench.tables import (
    HIGHER_IS_BETTER,
    METRICS,
    PROTOCOLS,
    Cell,
    Table,
    average_accuracy,
    build_listing,
    choose_metrics,
    find_rule_judgement,
    format_heading,
    list_audit_problems,
    load_cells,
    merge_folds,
)
from apical.core.registry import RULES
from apical.errors import ApicalError
from apical.extras import import_extra
from apical.files import replace_atomically
from apical.plausibility.page import claims

FORMATS = ("csv", "json", "parquet", "latex", "markdown")
TITLES = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "svhn": "SVHN",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tiny_imagenet": "Tiny-ImageNet",
    "mlp": "MLP",
    "cnn": "CNN",
    "rnn": "RNN",
    "textcnn": "TextCNN",
    "subj": "Subj",
    "mr": "MR",
}
ESCAPES = {
    **{c: f"\\{c}" for c in "_%&#${}"},
    **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "Θ": r"$\Theta$"},
    **{"<": "$<$", ">": "$>$", "|": "$|$"},
}
CRITERIA_NOTE = "C1--C3 are measured by \\texttt{apical audit}; in brackets the paper's, where they differ."


def export(store: Store, format: str, chosen: Plan | None = None) -> str | bytes:
    """Return all runs of a store, or those of a plan, in one of `FORMATS`."""
    if format not in FORMATS:
        raise ApicalError(f"unknown format {format!r}; {', '.join(FORMATS)} work.")
    keys = None if chosen is None else {j.declaration.key for j in chosen.jobs if j.declaration is not None}
    runs, cells = store.runs(keys), _load_all_cells(store, chosen)
    if chosen is not None and not runs and format != "markdown":  # Markdown tables say "not run"
        raise ApicalError(f"{store.path} holds no run of the suite {chosen.suite.name!r}.")
    if format == "latex":
        folds = None if chosen is None else chosen.suite.folds
        return format_latex(cells if folds is None else merge_folds(cells, folds))
    if format == "markdown":
        made = chosen.tables(store.path) if chosen else _build_listings(cells)
        return "\n\n".join(render.format_markdown(table) for table in made) + "\n"
    rows = [_flatten_run(row, store) for row in runs]
    if format == "json":
        return json.dumps(rows, indent=1) + "\n"
    table = [{name: _to_scalar(value) for name, value in row.items() if name != "epochs"} for row in rows]
    return _format_csv(table) if format == "csv" else _format_parquet(table)


def write_export(path: Path, content: str | bytes) -> None:
    """Write an export to a file."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _flatten_run(row: Row, store: Store) -> dict[str, Any]:
    """Return a run as a flat dictionary: its settings, its score and its columns. `epochs` is its history."""
    history = store.history(row)
    asked = row.declaration.to_dict()
    ours = {
        name: value for name, value in row.__dict__.items() if name not in ("id", "declaration", "owner", "heartbeat")
    }
    last = {name: value for name, value in history[-1].items() if name != "seed"} if history else {}
    measure = choose_metrics(history, asked["data"])[0]
    return {
        **{name: asked[name] for name in ("rule", "model", "data")},
        "seed": row.seed,
        "status": row.status,
        "old": row.old,
        "measure": measure,
        "score": METRICS[measure].read(history, asked["protocol"]) if row.status == "done" else None,
        **{
            f"last_{name}": last.get(name)
            for name in ("epoch", "loss", "accuracy", "test_loss", "test_accuracy", "test_mse", "test_mae")
        },
        **{name: value for name, value in ours.items() if name not in ("seed", "status")},
        "declaration": asked,
        "epochs": history,
    }


def _to_scalar(value: Any) -> Any:
    """Return a value that fits into one field; dictionaries and lists become JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


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


def _load_all_cells(store: Store, chosen: Plan | None) -> list[Cell]:
    """Return the cells of a plan, or of every declaration of the store."""
    if chosen is not None:
        return load_cells(chosen.jobs, store)
    seeds: dict[str, list[Row]] = {}
    for row in store.runs():
        seeds.setdefault(row.key, []).append(row)
    jobs = []
    for rows in seeds.values():
        one = rows[0].declaration
        own = _find_differences(one, [other[0].declaration for other in seeds.values()])
        if one.examples is not None:
            own["examples"] = one.examples
        numbers = tuple(sorted(row.seed for row in rows))
        jobs.append(Job(one.rule, one.model, one.data, one.epochs, numbers, own, one, None))
    return load_cells(jobs, store)


def _find_differences(one: Declaration, all_: list[Declaration]) -> dict[str, Any]:
    """Return the settings in which a declaration differs from others of the same rule, network and data."""
    alike = [other.to_dict() for other in all_ if str(other) == str(one)]
    own = one.to_dict()
    return {name: own[name] for name in own if any(other.get(name) != own[name] for other in alike)}


def _build_listings(cells: list[Cell]) -> list[Table]:
    """Return one list for each data set and network."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.job.data, cell.job.model), []).append(cell)
    return [build_listing(f"{data}, {model}", group, ()) for (data, model), group in sorted(groups.items())]


# LaTeX.


def format_latex(cells: list[Cell]) -> str:
    """Return a table as a paper prints it: a block of rules with their criteria for each network, the best in bold."""
    columns = _list_columns(cells)
    models = dict.fromkeys(cell.job.model for cell in cells)
    blocks = [_format_block([cell for cell in cells if cell.job.model == model], columns) for model in models]
    heads = [_escape(format_heading(TITLES.get(d, d), metric)) for d, metric in columns] + (
        ["Avg."] if _has_average(columns) else []
    )
    return "\n".join(
        [
            "% Mean and standard deviation over seeds; best of each network in bold. Needs",
            "% \\usepackage{amssymb}",
            "% \\usepackage{booktabs}",
            f"\\begin{{tabular}}{{lcccl{'r' * len(heads)}}}",
            "\\toprule",
            f"{' & '.join(['Method', 'C1', 'C2', 'C3', 'Model', *heads])} \\\\",
            *(line for block in blocks for line in ("\\midrule", *block)),
            "\\bottomrule",
            *(
                f"\\multicolumn{{{5 + len(heads)}}}{{l}}{{\\footnotesize {note}}} \\\\"
                for note in (CRITERIA_NOTE, *map(_escape, list_audit_problems(cells)))
            ),
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


def _has_average(columns: list[Column]) -> bool:
    """Return whether an average makes sense: there are several columns, all of accuracies."""
    return len(columns) > 1 and all(metric == "accuracy" for _, metric in columns)


def _format_block(cells: list[Cell], columns: list[Column]) -> list[str]:
    """Return the lines of one network."""
    lines: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        labels = [f"{_format_name(name)} {value}" for name, value in cell.job.varied.items()]
        if cell.protocol != "clean" and "protocol" not in cell.job.varied:
            labels.append(PROTOCOLS[cell.protocol])
        lines.setdefault((cell.job.rule, ", ".join(labels)), {})[cell.job.data] = cell
    best, model = {column: _find_best(cells, *column) for column in columns}, cells[0].job.model
    data = [d for d, _ in columns]
    body = []
    for (rule, own), line in lines.items():
        name = _format_title(rule) + (f" ({_escape(own)})" if own else "")
        marks = " & ".join(_format_criteria(rule, line.values()))
        scores = " & ".join(_format_cell(line.get(d), metric, best[d, metric]) for d, metric in columns)
        mean = average_accuracy(line, data) if _has_average(columns) else None
        average = f" & {mean:.2f}" if mean is not None else " & --" if _has_average(columns) else ""
        body.append(f"{name} & {marks} & {TITLES.get(model, _escape(model))} & {scores}{average} \\\\")
    return body


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
    pairs = zip(ours, claims(rule) or ours, strict=True)
    return [_format_mark(own) + (f" ({_format_mark(paper)})" if paper != own else "") for own, paper in pairs]


def _format_mark(met: bool) -> str:
    """Return a check mark or a cross."""
    return "$\\checkmark$" if met else "$\\times$"


def _format_title(rule: str) -> str:
    """Return a rule's title and variant; its name if it has no title or is unknown here."""
    base, _, variant = rule.partition(":")
    title = (RULES[base].TITLE if base in RULES else "") or base
    return _escape(f"{title}, {variant}" if variant else title)


def _format_name(name: str) -> str:
    """Return the name of a setting as words."""
    return name.replace("_", " ")


def _escape(text: str) -> str:
    """Escape the characters that have a meaning in LaTeX."""
    return "".join(ESCAPES.get(c, c) for c in text)
