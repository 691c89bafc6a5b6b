"""The page: one HTML file with everything in it, which asks the network for nothing.

All text of a store is foreign: the template escapes it, the charts get it as JSON that cannot end its element, and the
page's policy lets no script run but the two that are in it, known by their hashes.
"""

import base64
import hashlib
import json
import math
from collections import Counter
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from apical.bench.results import command_of
from apical.bench.store import Row
from apical.bench.tables import METRICS
from apical.extras import extra
from apical.files import atomic
from apical.report.charts import Drawing, Section, sections
from apical.report.groups import Group, state, title, told
from apical.report.interactive import figure, tags
from apical.report.overview import JUDGES, entries, overviews

FILTERS = {"rule": "Rule", "model": "Network", "data": "Data", "suite": "Suite"}
VERSIONS = ("apical", "torch", "python", "cuda", "code")


def write(groups: list[Group], source: Path, page: Path) -> None:
    text = render(groups, source)
    with atomic(page) as temporary:
        temporary.write_text(text, "utf-8")


def render(groups: list[Group], source: Path) -> str:
    """The same groups always give the same page."""
    jinja2 = extra("jinja2", "the HTML page", "report")
    plotly = extra("plotly", "the HTML page", "report")
    asis = extra("markupsafe", "the HTML page", "report").Markup
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"fixed": _fixed, "title": title}
    found, drawn = entries(groups), sections(groups)
    figures = [figure(drawing) for section in drawn for drawing in section.drawings]
    library, script = plotly.offline.get_plotlyjs(), _file("web.js")
    text: str = environment.from_string(_file("web.html")).render(
        source=source.as_posix(),
        entries=found,
        tables=overviews(found),
        judges=JUDGES,
        metrics=METRICS,
        filters={name: (label, _values(groups, name)) for name, label in FILTERS.items()},
        facts=_facts(groups),
        tags={group.key: tags(group) for group in groups},
        details={group.key: _details(group) for group in groups},
        sections=_numbered(drawn),
        heights=[one["layout"]["height"] for one in figures],  # so that nothing moves when a chart is drawn
        figures=asis(as_json(figures)),
        policy=policy(library, script),
        style=asis(_file("web.css")),
        library=asis(library),
        script=asis(script),
    )
    return text


def _file(name: str) -> str:
    return resources.files("apical.report").joinpath(name).read_text("utf-8")


def policy(*scripts: str) -> str:
    """Nothing from anywhere, and no script but these."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def as_json(value: Any) -> str:
    """JSON that may stand in an element of a page: nothing in it ends the element, and null is what is not a number.

    >>> as_json({"</script>": [float("nan"), 1.5]})
    '{"\\\\u003c/script\\\\u003e":[null,1.5]}'
    """
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _fixed(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number as a table prints it."""
    if value is None or not math.isfinite(value):
        return "–"
    return (f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}").replace("-", "−")


def _values(groups: list[Group], name: str) -> list[str]:
    """What a filter can choose from."""
    found: dict[str, None] = {}
    for group in groups:
        value = tags(group)[name]
        found |= dict.fromkeys(value if isinstance(value, list) else [value])
    return list(found)


def _facts(groups: list[Group]) -> list[tuple[str, str]]:
    """What the page begins with."""
    rows = [row for group in groups for row in group.cell.rows]
    days = sorted(row.finished[:10] for row in rows if row.finished)
    versions = {f"{n} {v}" for row in rows for n in ("apical", "torch") if (v := getattr(row, n)) is not None}
    facts = {
        "runs": ", ".join(f"{count} {name}" for name, count in Counter(map(state, rows)).items()),
        "devices": ", ".join(sorted({row.device for row in rows if row.device})),
        "versions": ", ".join(sorted(versions)),
        "finished": " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
    }
    return [(name, value) for name, value in facts.items() if value]


def _details(group: Group) -> dict[str, Any]:
    """All that is known of a declaration's runs, seed by seed."""
    rows = group.cell.rows
    commands: dict[str, list[int]] = {}
    for row in rows:
        commands.setdefault(row.command or command_of(row.declaration.settings([row.seed])), []).append(
            row.seed
        )
    return {
        "key": group.key,
        "commands": list(commands),
        "settings": {name: told(value) for name, value in group.settings.items()},
        "seeds": [_seed(group, row, number) for row, number in zip(rows, group.curves, strict=True)],
        "errors": list(dict.fromkeys(row.error for row in rows if row.error)),
        "places": list(dict.fromkeys(_place(row) for row in rows if row.device or row.torch)),
        "old": group.cell.old,
    }


def _seed(group: Group, row: Row, number: int) -> dict[str, Any]:
    curve = group.curves[number]
    last = curve[-1] if curve else {}
    scores = {name: group.cell.scores(name).get(number) for name in group.cell.metrics}
    return {
        "seed": row.seed,
        "state": state(row),
        "epochs": last.get("epoch", 0),
        "scores": [_fixed(value, METRICS[name].digits) for name, value in scores.items()],
        "loss": _fixed(last.get("loss"), 4),
        "seconds": _fixed(row.seconds_per_epoch, 3),
        "memory": "–" if row.peak_memory is None else f"{row.peak_memory / 1e6:.0f} MB",
        "finished": (row.finished or "–")[:16].replace("T", " "),
    }


def _place(row: Row) -> str:
    """The machine and the versions of a run."""
    known = [f"{name} {value}" for name in VERSIONS if (value := getattr(row, name))]
    memory = [f"memory: {row.memory_kind}"] if row.memory_kind else []
    return "; ".join([row.device or "an unknown device", ", ".join(known), *memory])


def _numbered(drawn: list[Section]) -> list[tuple[Section, list[tuple[int, Drawing]]]]:
    """Every drawing with its place in the list of figures."""
    numbers = count()
    return [(section, [(next(numbers), one) for one in section.drawings]) for section in drawn]
