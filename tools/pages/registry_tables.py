"""Two tables that are made without any results: all rules in docs/rules/index.md, and the audit's in docs/audit.md."""

import re

import apical
from apical.plausibility.criteria import compare_with_paper, read_verdicts
from apical.plausibility.judge import TITLES, Audit, format_markdown

RULES_TABLE = re.compile(r"^\| rule \| C1.*?\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)
AUDIT_TABLES = re.compile(rf"^### {TITLES['c1']}\n.*?(?=\n\n## )", re.MULTILINE | re.DOTALL)


def replace_rules_table(text: str) -> str:
    """Return the text of docs/rules/index.md with its table of rules made anew."""
    return _replace_once(RULES_TABLE, render_rules_table(), text)


def replace_audit_tables(text: str, audits: dict[str, Audit]) -> str:
    """Return the text of docs/audit.md with its tables of verdicts made anew, as `apical audit --markdown` prints them."""
    return _replace_once(AUDIT_TABLES, format_markdown(audits), text)


def _replace_once(pattern: re.Pattern[str], table: str, text: str) -> str:
    replaced, count = pattern.subn(lambda _: table, text)
    assert count == 1, f"{count} tables begin with {pattern.pattern[:30]!r}"
    return replaced


def render_rules_table() -> str:
    """Render one row for each rule that comes with apical."""
    built_in = [rule for rule in apical.RULES.values() if rule.__module__.startswith("apical.")]
    heading = "| rule | C1 C2 C3 | plain model predicts | networks | variants | source |"
    return "\n".join([heading, "|---|---|---|---|---|---|", *map(_render_row, built_in), ""])


def _render_row(rule: type[apical.Learner]) -> str:
    cells = [
        f"[`{rule.NAME}`]({rule.NAME}.md) {rule.TITLE}",
        compare_with_paper(rule.NAME, read_verdicts()[rule.NAME]),
        "yes" if rule.MODEL_PREDICTS else "no",
        "MLP, CNN" + ", Parallel" * rule.PARALLEL + ", Elman" * rule.RECURRENT,
        ", ".join(f"`{name}`" for name in apical.rule_names() if name.startswith(f"{rule.NAME}:")),
        rule.SOURCE,
    ]
    return f"| {' | '.join(cells)} |"
