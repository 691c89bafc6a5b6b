"""`apical audit`: measure C1 to C3 of rules."""

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.table import Table
from torch import nn
from typer import Argument, Option

import apical
from apical.cli.root import app, console, echo, find_builder
from apical.core.registry import resolve
from apical.errors import ApicalError, UnsupportedError
from apical.models import IMAGE_MODELS
from apical.models import build as build_model
from apical.plausibility import Audit
from apical.plausibility.criteria import CRITERIA, format_verdicts
from apical.plausibility.judge import audit_rules, build_audit_network, format_markdown
from apical.printing import print_error


@app.command("audit")
def audit_(
    rules: Annotated[list[str] | None, Argument(help="Rules, or NAME:VARIANT; all by default.")] = None,
    model: Annotated[
        str | None, Option(help="mlp or cnn for the digits, or MODULE:FUNCTION; by default three small layers.")
    ] = None,
    shape: Annotated[
        str | None, Option(help="Sizes of one example, 3,32,32, for a MODULE:FUNCTION with convolutions.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Everything that was measured, as JSON.")] = False,
    as_markdown: Annotated[
        bool, Option("--markdown", help="The verdicts with their evidence, as in docs/audit.md.")
    ] = False,
) -> None:
    """Experiment with rules, watch them learn, and judge their biological plausibility: C1, C2 and C3, beside the paper's.

    Example: apical audit bp fa dll --model cnn
    """
    for name in rules or ():
        resolve(name)
    build, sizes = _choose_network(model, shape)
    audits: dict[str, Audit] = {}
    for name, found in audit_rules(rules or apical.rule_names(), build, sizes):
        if not isinstance(found, UnsupportedError):
            audits[name] = found
        elif rules:
            raise found
        else:
            print_error(f"{name} is left out: {found}")
    if as_json:
        typer.echo(json.dumps({"rules": {name: audit.to_dict() for name, audit in audits.items()}}, indent=1))
    elif as_markdown:
        echo(format_markdown(audits))
    else:
        console.print(_make_table(audits))


def _choose_network(model: str | None, shape: str | None) -> tuple[Callable[[], nn.Sequential], tuple[int, ...] | None]:
    """Return a function that builds the network to audit on, and the sizes of one example."""
    build = build_audit_network if model is None else find_builder(model)
    if shape is not None and (model is None or isinstance(build, str)):
        raise ApicalError(
            f"--shape {shape} is for a network of yours, --model MODULE:FUNCTION; the others have their own."
        )
    if isinstance(build, str):
        if not build.startswith(IMAGE_MODELS):
            raise ApicalError(f"the audit has no {model}; mlp, cnn or MODULE:FUNCTION works for --model.")
        return partial(build_model, build, "digits"), (1, 8, 8)
    try:
        return build, tuple(int(n) for n in shape.split(",")) if shape is not None else None
    except ValueError:
        raise ApicalError(f"--shape {shape!r} is not a list of sizes such as 3,32,32.") from None


def _make_table(audits: dict[str, Audit]) -> Table:
    note = "✓ met, ✗ not met, ? undecided. paper: what it says of C1, C2 and C3. The evidence is for what is not met."
    table = Table("rule", "C1", "C2", "C3", "paper", "evidence", caption=note)
    for name, audit in audits.items():
        marks = format_verdicts(getattr(audit, criterion) for criterion in CRITERIA)
        paper = " ".join(format_verdicts(audit.paper))
        why = [audit.facts["evidence"][c] for c in CRITERIA if not getattr(audit, c)]
        table.add_row(name, *marks, paper, "\n".join(why))
    return table
