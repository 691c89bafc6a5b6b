"""Render pages from templates, in which every number is computed from the results.

A template `tools/pages/templates/NAME.md` becomes `docs/NAME.md`. It is written for Jinja: `{{ gain(...) }}` calls a method
of `Facts`, and `{% do hold(CONDITION, "SENTENCE") %}` names a sentence that the results no longer bear out.
"""

import json
import re
from pathlib import Path
from typing import Any

import jinja2

from tools.pages.blocks import Results, render_lines
from tools.pages.claims import REFUTED, REPRODUCED, find_rival, judge_claims, render_claims
from tools.pages.facts import PLACES, Facts
from tools.scaling import Scaling, render_step_times

FOLDER = Path("tools", "pages", "templates")
EXPERIMENTS = ("svhn-contrast", "steps-NVIDIA-H200")
"""Small experiments and timings whose results are a file `results/NAME.json`."""


def render_templates(root: Path, results: Results) -> tuple[dict[Path, str], list[str]]:
    """Return the text of each page that has a template, and the sentences that the results contradict."""
    texts: dict[Path, str] = {}
    contradicted: list[str] = []
    loader = jinja2.FileSystemLoader(root / FOLDER)
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        autoescape=False,  # the pages are Markdown
    )
    for path in sorted((root / FOLDER).glob("*.md")):
        facts = Facts(results.cells, lambda asked: render_lines(asked, results), results.trials)
        name = path.name
        text = environment.get_template(name).render(_make_context(facts, root))
        texts[root / "docs" / name] = re.sub(r"\s*\n(\s*\n)+", "\n\n", text).strip() + "\n"
        contradicted += [f"docs/{name} says: {sentence}" for sentence in facts.contradicted]
    return texts, contradicted


def _make_context(facts: Facts, root: Path) -> dict[str, Any]:
    """Return the names that a template can use."""
    methods = {name: getattr(facts, name) for name in dir(Facts) if not name.startswith("_")}
    files = {name.replace("-", "_"): _read_json(root / "results" / f"{name}.json") for name in EXPERIMENTS}
    claims = judge_claims(facts)
    counts = {
        f"count_{verdict}": sum(claim.verdict == verdict for claim in claims) for verdict in (REPRODUCED, REFUTED)
    }
    return {
        **methods,
        **files,
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
