"""A store as CSV, JSON or Parquet for whoever computes on; and its tables as Markdown, or as LaTeX for a paper."""

import csv
import io
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apical.bench import render
from apical.bench.compare import spread
from apical.bench.declaration import Declaration
from apical.bench.plan import Plan
from apical.bench.store import Row, Store
from apical.bench.suites import Job
from apical.bench.tables import (
    METRICS,
    PROTOCOLS,
    RISING,
    Cell,
    Table,
    audit_problems,
    cells,
    judgement_on,
    listing,
    mean_over,
    measured,
    measures,
    over_folds,
)
from apical.core.registry import RULES
from apical.errors import ApicalError
from apical.extras import extra
from apical.files import atomic
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
CRITERIA = "C1--C3 are measured by \\texttt{apical audit}; in brackets the paper's, where they differ."


def export(store: Store, format: str, chosen: Plan | None = None) -> str | bytes:
    """All runs of a store, or those of a plan, in a format of `FORMATS`."""
    if format not in FORMATS:
        raise ApicalError(f"unknown format {format!r}; {', '.join(FORMATS)} work.")
    keys = None if chosen is None else {j.declaration.key for j in chosen.jobs if j.declaration is not None}
    runs, found = store.runs(keys), _cells(store, chosen)
    if chosen is not None and not runs and format != "markdown":  # whose tables say "not run"
        raise ApicalError(f"{store.path} holds no run of the suite {chosen.suite.name!r}.")
    if format == "latex":
        folds = None if chosen is None else chosen.suite.folds
        return latex(found if folds is None else over_folds(found, folds))
    if format == "markdown":
        made = chosen.tables(store.path) if chosen else _listings(found)
        return "\n\n".join(render.markdown(table) for table in made) + "\n"
    rows = [_flat(row, store) for row in runs]
    if format == "json":
        return json.dumps(rows, indent=1) + "\n"
    table = [{name: _scalar(value) for name, value in row.items() if name != "epochs"} for row in rows]
    return _csv(table) if format == "csv" else _parquet(table)


def write(path: Path, content: str | bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _flat(row: Row, store: Store) -> dict[str, Any]:
    """One run: what was asked for, what came out, and where; `epochs` has its history."""
    history = store.history(row)
    asked = row.declaration.to_dict()
    ours = {
        name: value
        for name, value in row.__dict__.items()
        if name not in ("id", "declaration", "owner", "heartbeat")
    }
    last = {name: value for name, value in history[-1].items() if name != "seed"} if history else {}
    measure = measures(history, asked["data"])[0]
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


def _scalar(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _csv(table: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else ["rule"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _parquet(table: list[dict[str, Any]]) -> bytes:
    arrow = extra("pyarrow", "a Parquet file", "parquet")
    parquet = extra("pyarrow.parquet", "a Parquet file", "parquet")
    sink = arrow.BufferOutputStream()
    parquet.write_table(arrow.Table.from_pylist(table), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _cells(store: Store, chosen: Plan | None) -> list[Cell]:
    """The runs of a plan; without one, every declaration of the store."""
    if chosen is not None:
        return cells(chosen.jobs, store)
    seeds: dict[str, list[Row]] = {}
    for row in store.runs():
        seeds.setdefault(row.key, []).append(row)
    jobs = []
    for rows in seeds.values():
        one = rows[0].declaration
        own = _differences(one, [other[0].declaration for other in seeds.values()])
        if one.examples is not None:
            own["examples"] = one.examples
        numbers = tuple(sorted(row.seed for row in rows))
        jobs.append(Job(one.rule, one.model, one.data, one.epochs, numbers, own, one, None))
    return cells(jobs, store)


def _differences(one: Declaration, all_: list[Declaration]) -> dict[str, Any]:
    """Settings in which a declaration differs from others of the same rule, network and data."""
    alike = [other.to_dict() for other in all_ if str(other) == str(one)]
    own = one.to_dict()
    return {name: own[name] for name in own if any(other.get(name) != own[name] for other in alike)}


def _listings(found: list[Cell]) -> list[Table]:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in found:
        groups.setdefault((cell.job.data, cell.job.model), []).append(cell)
    return [listing(f"{data}, {model}", group, ()) for (data, model), group in sorted(groups.items())]


# LaTeX.


def latex(found: list[Cell]) -> str:
    """The table as a paper prints it: a block of methods with their criteria for each network, the best in bold."""
    columns = _columns(found)
    models = dict.fromkeys(cell.job.model for cell in found)
    blocks = [_block([cell for cell in found if cell.job.model == model], columns) for model in models]
    heads = [_escaped(measured(TITLES.get(d, d), metric)) for d, metric in columns] + (
        ["Avg."] if _averaged(columns) else []
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
                for note in (CRITERIA, *map(_escaped, audit_problems(found)))
            ),
            "\\end{tabular}",
            "",
        ]
    )


Column = tuple[str, str]
"""A data set and a measure."""


def _columns(found: list[Cell]) -> list[Column]:
    """Each data set with all that is measured on it; where nothing has run yet, with what would be."""
    told = {cell.job.data for cell in found if cell.histories}
    listed = [cell for cell in found if cell.histories or cell.job.data not in told]
    pairs = dict.fromkeys((cell.job.data, metric) for cell in listed for metric in cell.metrics)
    return [
        (d, metric) for d in dict.fromkeys(cell.job.data for cell in found) for on, metric in pairs if on == d
    ]


def _averaged(columns: list[Column]) -> bool:
    return len(columns) > 1 and all(metric == "accuracy" for _, metric in columns)


def _block(found: list[Cell], columns: list[Column]) -> list[str]:
    """The lines of one network."""
    lines: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in found:
        told = [f"{_word(name)} {value}" for name, value in cell.job.varied.items()]
        if cell.protocol != "clean" and "protocol" not in cell.job.varied:
            told.append(PROTOCOLS[cell.protocol])
        lines.setdefault((cell.job.rule, ", ".join(told)), {})[cell.job.data] = cell
    best, model = {column: _best(found, *column) for column in columns}, found[0].job.model
    data = [d for d, _ in columns]
    body = []
    for (rule, own), line in lines.items():
        name = _title(rule) + (f" ({_escaped(own)})" if own else "")
        marks = " & ".join(_criteria(rule, line.values()))
        scores = " & ".join(_latex_cell(line.get(d), metric, best[d, metric]) for d, metric in columns)
        mean = mean_over(line, data) if _averaged(columns) else None
        average = f" & {mean:.2f}" if mean is not None else " & --" if _averaged(columns) else ""
        body.append(f"{name} & {marks} & {TITLES.get(model, _escaped(model))} & {scores}{average} \\\\")
    return body


def _best(found: list[Cell], data: str, metric: str) -> float | None:
    """The best mean on a data set; quick runs are no results."""
    here = [c for c in found if c.job.data == data and "examples" not in c.job.varied]
    means = [statistics.fmean(scores.values()) for c in here if (scores := c.scores(metric))]
    return (max if metric in RISING else min)(means) if means else None


def _latex_cell(cell: Cell | None, metric: str, best: float | None) -> str:
    """The mean in bold where it is the best, and its spread where there is more than one seed."""
    values = [] if cell is None else list(cell.scores(metric).values())
    if not values:
        return "--"
    digits = METRICS[metric].digits
    mean = statistics.fmean(values)
    text = f"{mean:.{digits}f}"
    text = f"\\textbf{{{text}}}" if mean == best else text
    return text + (f" {{\\scriptsize $\\pm$ {spread(values):.{digits}f}}}" if len(values) > 1 else "")


def _criteria(rule: str, found: Iterable[Cell]) -> list[str]:
    """The audit's verdicts as the other tables have them; the paper's in brackets, where they differ."""
    judgement = judgement_on(rule, found)
    ours = judgement.criteria
    if ours is None:
        return ["?" if judgement.problem else ""] * 3
    pairs = zip(ours, claims(rule) or ours, strict=True)
    return [_mark(own) + (f" ({_mark(paper)})" if paper != own else "") for own, paper in pairs]


def _mark(met: bool) -> str:
    return "$\\checkmark$" if met else "$\\times$"


def _title(rule: str) -> str:
    """A rule's title and its variant; the plain name of one without a title, or that is not here."""
    base, _, variant = rule.partition(":")
    title = (RULES[base].TITLE if base in RULES else "") or base
    return _escaped(f"{title}, {variant}" if variant else title)


def _word(name: str) -> str:
    return name.replace("_", " ")


def _escaped(text: str) -> str:
    return "".join(ESCAPES.get(c, c) for c in text)
