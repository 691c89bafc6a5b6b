"""Write the HTML page: one file with everything in it, which loads nothing from the network.

Text from a store is not trusted: the template escapes it, charts get it as JSON that cannot close its HTML element, and
the content security policy allows only the two scripts of the page, by their hashes.
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

from apical.bench.cells import METRICS
from apical.bench.declaration import build_train_command
from apical.bench.export import find_title
from apical.bench.store import Row
from apical.extras import import_extra
from apical.files import replace_atomically
from apical.report.charts import ChartSection, Drawing, make_chart_sections
from apical.report.finding import find_finding
from apical.report.groups import Group, format_value
from apical.report.interactive import get_tags, make_figure
from apical.report.overview import JUDGES, make_entries, make_overviews
from apical.report.styles import SYMBOLS

FILTERS = {"rule": "Rule", "model": "Network", "data": "Data", "suite": "Suite"}
SHADES = {3: "keeps all three criteria", 2: "two", 1: "one", 0: "none", None: "not known"}
"""What the colours of the first chart mean, by the number of criteria that a rule keeps."""
VERSIONS = ("apical", "torch", "python", "cuda", "code")


def write(groups: list[Group], source: Path, page: Path) -> None:
    text = render(groups, source)
    with replace_atomically(page) as temporary:
        temporary.write_text(text, "utf-8")


def render(groups: list[Group], source: Path) -> str:
    """Return the HTML of the page. The same groups always give the same text."""
    jinja2 = import_extra("jinja2", "the HTML page", "report")
    plotly = import_extra("plotly", "the HTML page", "report")
    markup = import_extra("markupsafe", "the HTML page", "report").Markup
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"fixed": _format_fixed, "title": find_title}
    entries, sections = make_entries(groups), make_chart_sections(groups)
    finding = find_finding(entries)
    kept = {bar.kept for bar in finding.bars} if finding else set()
    figures = [make_figure(drawing) for section in sections for drawing in section.drawings]
    library, script = plotly.offline.get_plotlyjs(), _read_file("web.js")
    text: str = environment.from_string(_read_file("web.html")).render(
        source=source.as_posix(),
        entries=entries,
        finding=finding,
        shades={count: label for count, label in SHADES.items() if count in kept},
        shapes=SYMBOLS,
        tables=make_overviews(entries),
        judges=JUDGES,
        metrics=METRICS,
        filters={name: (label, _find_filter_values(groups, name)) for name, label in FILTERS.items()},
        facts=_collect_facts(groups),
        tags={group.key: get_tags(group) for group in groups},
        details={group.key: _collect_details(group) for group in groups},
        sections=_number_drawings(sections),
        figures=markup(to_json(figures)),
        policy=make_policy(library, script),
        style=markup(_read_file("web.css")),
        library=markup(library),
        script=markup(script),
    )
    return text


def _read_file(name: str) -> str:
    return resources.files("apical.report").joinpath(name).read_text("utf-8")


def make_policy(*scripts: str) -> str:
    """Return a content security policy that allows only these scripts and no network access."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def to_json(value: Any) -> str:
    """Return JSON that is safe in an HTML element: it cannot close the element, and NaN and infinities are null.

    >>> to_json({"</script>": [float("nan"), 1.5]})
    '{"\\\\u003c/script\\\\u003e":[null,1.5]}'
    """
    rounded = json.loads(
        json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.6g}"), parse_constant=lambda name: None
    )
    text = json.dumps(rounded, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _format_fixed(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """Return a number with fixed digits, as tables show it."""
    if value is None or not math.isfinite(value):
        return "–"
    return (f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}").replace("-", "−")


def _find_filter_values(groups: list[Group], name: str) -> list[str]:
    found = [get_tags(group)[name] for group in groups]
    return list(dict.fromkeys(one for value in found for one in (value if isinstance(value, list) else [value])))


def _collect_facts(groups: list[Group]) -> list[tuple[str, str]]:
    """Return the facts at the top of the page, with their names."""
    rows = [row for group in groups for row in group.cell.rows]
    days = sorted(row.finished[:10] for row in rows if row.finished)
    versions = {f"{n} {v}" for row in rows for n in ("apical", "torch") if (v := getattr(row, n)) is not None}
    facts = {
        "runs": ", ".join(f"{count} {name}" for name, count in Counter(row.state for row in rows).items()),
        "devices": ", ".join(sorted({row.device for row in rows if row.device})),
        "versions": ", ".join(sorted(versions)),
        "finished": " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
    }
    return [(name, value) for name, value in facts.items() if value]


def _collect_details(group: Group) -> dict[str, Any]:
    """Return the details of a group: commands, settings, and the results of each seed."""
    rows = group.cell.rows
    commands = [row.command or build_train_command(row.declaration.settings([row.seed])) for row in rows]
    return {
        "key": group.key,
        "commands": list(dict.fromkeys(commands)),
        "settings": {name: format_value(value) for name, value in group.settings.items()},
        "seeds": [_describe_seed(group, row, number) for row, number in zip(rows, group.curves, strict=True)],
        "errors": list(dict.fromkeys(row.error for row in rows if row.error)),
        "places": list(dict.fromkeys(_describe_machine(row) for row in rows if row.device or row.torch)),
        "old": group.cell.old,
    }


def _describe_seed(group: Group, row: Row, number: int) -> dict[str, Any]:
    curve = group.curves[number]
    last = curve[-1] if curve else {}
    scores = {name: group.cell.scores(name).get(number) for name in group.cell.metrics}
    return {
        "seed": row.seed,
        "state": row.state,
        "epochs": last.get("epoch", 0),
        "scores": [_format_fixed(value, METRICS[name].digits) for name, value in scores.items()],
        "loss": _format_fixed(last.get("loss"), 4),
        "seconds": _format_fixed(row.seconds_per_epoch, 3),
        "memory": "–" if row.peak_memory is None else f"{row.peak_memory / 1e6:.0f} MB",
        "finished": (row.finished or "–")[:16].replace("T", " "),
    }


def _describe_machine(row: Row) -> str:
    known = [f"{name} {value}" for name in VERSIONS if (value := getattr(row, name))]
    memory = [f"memory: {row.memory_kind}"] if row.memory_kind else []
    return "; ".join([row.device or "an unknown device", ", ".join(known), *memory])


def _number_drawings(sections: list[ChartSection]) -> list[tuple[ChartSection, list[tuple[int, Drawing]]]]:
    """Return every drawing with its index in the list of figures."""
    numbers = count()
    return [(section, [(next(numbers), drawing) for drawing in section.drawings]) for section in sections]
