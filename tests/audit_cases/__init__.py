"""Rules that cheat and rules that do not, to try an audit of biological plausibility with.

`CASES` lists them; `docs/audit-cases.md` describes them. Each is a small `apical.Learner` for networks of Linear and
Tanh, whose docstring says what it does.
"""

from audit_cases import escapes, honest, phases, pipelines, transport
from audit_cases.base import CASES, Case, audit_case, build_case, format_cases

CHEATS = [case for case in CASES if case.breaks]
HONEST = [case for case in CASES if not case.breaks]

__all__ = [
    "CASES",
    "CHEATS",
    "HONEST",
    "Case",
    "audit_case",
    "build_case",
    "escapes",
    "format_cases",
    "honest",
    "phases",
    "pipelines",
    "transport",
]
