"""The table of the page `index.md` beside this file, from the registry: `python docs/rules/table.py` writes it anew."""

import re
from pathlib import Path

import apical
from apical.files import replace_atomically
from apical.plausibility.page import compare_with_paper
from apical.plausibility.recorded import read_verdicts

PAGE = Path(__file__).with_name("index.md")
TABLE = re.compile(r"^\| rule \| C1.*?\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)


def table() -> str:
    """A row for each rule that comes with apical."""
    ours = [rule for rule in apical.RULES.values() if rule.__module__.startswith("apical.")]
    head = "| rule | C1 C2 C3 | plain model predicts | networks | variants | source |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(row, ours), ""])


def row(rule: type[apical.Learner]) -> str:
    cells = [
        f"[`{rule.NAME}`]({rule.NAME}.md) {rule.TITLE}",
        compare_with_paper(rule.NAME, read_verdicts()[rule.NAME]),
        "yes" if rule.MODEL_PREDICTS else "no",
        "MLP, CNN" + ", Parallel" * rule.PARALLEL + ", Elman" * rule.RECURRENT,
        ", ".join(f"`{name}`" for name in apical.rule_names() if name.startswith(f"{rule.NAME}:")),
        rule.SOURCE,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    page, count = TABLE.subn(lambda _: table(), PAGE.read_text("utf-8"))
    assert count == 1, f"{PAGE} has {count} tables of rules"
    with replace_atomically(PAGE) as temporary:
        temporary.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
