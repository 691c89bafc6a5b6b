"""The verdicts as tables, for a terminal and for docs/audit.md."""

from collections.abc import Mapping

from apical.core.learner import Claims
from apical.core.registry import RULES
from apical.plausibility.audit import Audit
from apical.plausibility.criteria import CRITERIA

TITLES = {
    "c1": "C1: asymmetry of forward and backward weights",
    "c2": "C2: local error representation",
    "c3": "C3: non-two-stage training",
}


def mark(met: bool | None) -> str:
    """✓ or ✗, and nothing where nobody said anything."""
    return "" if met is None else "✓" if met else "✗"


def marks(claims: Claims | None) -> str:
    """Three verdicts in a row.

    >>> marks(Claims(True, True, False))
    '✓✓✗'
    """
    return "" if claims is None else "".join(mark(met) for met in claims)


def claims(rule: str) -> Claims | None:
    """What the paper says of C1 to C3, of a rule that it judges."""
    known = RULES.get(rule.partition(":")[0])
    return None if known is None else known.CLAIMS


def compare_with_paper(rule: str, verdict: Claims | None) -> str:
    """Return the verdict on a rule and, after ≠, what the paper says if that is something else.

    >>> compare_with_paper("dll", Claims(True, True, False)), compare_with_paper("pc", Claims(False, True, False))
    ('✓✓✗ ≠ ✓✓✓', '✗✓✗')
    """
    ours, theirs = marks(verdict), marks(claims(rule))
    return f"{ours} ≠ {theirs}" if ours and theirs and ours != theirs else ours


def says(audit: Audit, criterion: str) -> bool | None:
    """The paper's verdict."""
    return None if audit.paper is None else bool(getattr(audit.paper, criterion))


def markdown(audits: Mapping[str, Audit]) -> str:
    """One table for each criterion: the verdict, the paper's, and the evidence. ≠ marks where the two differ."""
    parts = []
    for criterion in CRITERIA:
        lines = [f"### {TITLES[criterion]}", "", "| rule | audit | paper | | evidence |", "|---|---|---|---|---|"]
        for name, audit in audits.items():
            ours, theirs = getattr(audit, criterion), says(audit, criterion)
            differs = "≠" if theirs is not None and theirs != ours else ""
            evidence = audit.facts["evidence"][criterion]
            lines.append(f"| `{name}` | {mark(ours)} | {mark(theirs)} | {differs} | {evidence} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
