"""Write the audit's verdicts on the built-in rules to src/apical/plausibility/verdicts.json: python tools/verdicts.py"""

import json
from pathlib import Path

import apical.plausibility
from apical.files import replace_atomically

PATH = Path(apical.plausibility.__file__).with_name("verdicts.json")


def main() -> None:
    audits = apical.plausibility.verdicts()
    lines = [
        f" {json.dumps(rule)}: {json.dumps({name: getattr(audit, name) for name in ('c1', 'c2', 'c3')})}"
        for rule, audit in audits.items()
    ]
    with replace_atomically(PATH) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
