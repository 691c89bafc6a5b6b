"""Render pages from templates, in which every number is computed from the results.

A template `tools/pages/templates/NAME.md` becomes `docs/NAME.md`. It is written for Jinja: `{{ gain(...) }}` calls a method
of `Facts`, and `{% do hold(CONDITION, "SENTENCE") %}` names a sentence that the results no longer bear out. So are the
diagnoses of `results/diagnoses.toml`, which may use the macros of `tools/pages/templates/diagnoses.jinja`.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2

from apical.errors import ApicalError
from tools.pages.blocks import Results, render_lines
from tools.pages.claims import REFUTED, REPRODUCED, find_rival, judge_claims, render_claims
from tools.pages.facts import PLACES, Facts
from tools.pages.notes import Notes
from tools.scaling import Scaling, render_step_times

FOLDER = Path("tools", "pages", "templates")
MACROS = Path(__file__).parent / "templates" / "diagnoses.jinja"
"""What several diagnoses say."""
EXPERIMENTS = ("svhn-contrast", "steps-NVIDIA-H200")
"""Small experiments and timings whose results are a file `results/NAME.json`."""


def render_templates(root: Path, results: Results) -> tuple[dict[Path, str], list[str]]:
    """Return the text of each page that has a template, and the sentences that the results contradict."""
    texts: dict[Path, str] = {}
    contradicted: list[str] = []
    environment = _make_environment(root)
    for path in sorted((root / FOLDER).glob("*.md")):
        facts, name = _make_facts(results), path.name
        text = environment.get_template(name).render(_make_context(facts, root))
        texts[root / "docs" / name] = re.sub(r"\s*\n(\s*\n)+", "\n\n", text).strip() + "\n"
        contradicted += [f"docs/{name} says: {sentence}" for sentence in facts.contradicted]
    return texts, contradicted


def render_diagnoses(root: Path, results: Results) -> tuple[Notes, list[str]]:
    """Return the notes with every number of a diagnosis filled in, and the sentences that the results contradict.

    A diagnosis can use what a page can, and `suite`, `rule`, `model` and `data` of its cell, together `here`.
    """
    texts: dict[str, str] = {}
    contradicted: list[str] = []
    environment = _make_environment(root, finalize=_format_number)
    macros = MACROS.read_text("utf-8")
    for key, text in results.notes.diagnoses.items():
        facts = _make_facts(results)
        suite, rule, model, data = here = key.split("/")
        cell = {"here": here, "suite": suite, "rule": rule, "model": model, "data": data}
        try:
            filled = environment.from_string(macros + text).render(_make_basic_context(facts, root) | cell)
        except (ApicalError, ArithmeticError, LookupError, TypeError, ValueError, jinja2.TemplateError) as error:
            raise ApicalError(f"the diagnosis {key} cannot be filled in: {error}") from error
        texts[key] = " ".join(filled.split())
        contradicted += [f"the diagnosis {key} says: {sentence}" for sentence in facts.contradicted]
    return replace(results.notes, diagnoses=texts), contradicted


def _format_number(value: Any) -> Any:
    return _format_fixed(value) if isinstance(value, float) else value


def _format_fixed(number: float, digits: int = 2, sign: str = "") -> str:
    """Return a number with so many digits; the mean of what has not been run is NaN.

    >>> _format_fixed(1.234), _format_fixed(1.234, 1, "+"), _format_fixed(math.nan)
    ('1.23', '+1.2', 'not run yet')
    """
    return "not run yet" if math.isnan(number) else f"{number:{sign}.{digits}f}"


def _make_environment(root: Path, **options: Any) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / FOLDER),
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        autoescape=False,  # the pages are Markdown
        **options,
    )
    environment.filters["fixed"] = _format_fixed
    environment.filters["signed"] = lambda number, digits=2: _format_fixed(number, digits, "+")
    environment.filters["upper_first"] = lambda text: text[:1].upper() + text[1:]
    environment.filters["lower_first"] = lambda text: text[:1].lower() + text[1:]
    return environment


def _make_facts(results: Results) -> Facts:
    return Facts(results.cells, lambda asked: render_lines(asked, results), results.trials)


def _make_basic_context(facts: Facts, root: Path) -> dict[str, Any]:
    """Return the methods of `Facts`, the files of experiments, and the rows that each of `examples` wrote."""
    methods = {name: getattr(facts, name) for name in dir(Facts) if not name.startswith("_")}
    files = {name.replace("-", "_"): _read_json(root / "results" / f"{name}.json") for name in EXPERIMENTS}
    examples = {
        path.stem.replace("-", "_"): [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in sorted((root / "results" / "examples").glob("*.jsonl"))
    }
    return {**methods, **files, "examples": examples}


def _make_context(facts: Facts, root: Path) -> dict[str, Any]:
    """Return the names that a template can use."""
    claims = judge_claims(facts)
    counts = {
        f"count_{verdict}": sum(claim.verdict == verdict for claim in claims) for verdict in (REPRODUCED, REFUTED)
    }
    return {
        **_make_basic_context(facts, root),
        **counts,
        "claims": "\n".join(render_claims(claims)),
        "claim_count": len(claims),
        "rival": find_rival(facts),
        "places": PLACES,
        "scaling": Scaling(root / "results" / "scaling"),
        "render_step_times": render_step_times,
    }


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None
