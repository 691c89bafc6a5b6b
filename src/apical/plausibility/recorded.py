"""The audit's verdicts as data, so that a table or a page can show them without running the audit.

`verdicts.json` has the verdicts on the built-in rules: `python tools/verdicts.py` writes it, and a test compares it with
the live audit. A rule of your own is audited once, when its results are made, and the verdict is stored with them.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from apical.core.learner import Claims
from apical.core.registry import resolve
from apical.plausibility.audit import audit_rule


class Judgement(NamedTuple):
    """What the audit says of a rule: C1 to C3, or why it could not measure them; neither if it never ran."""

    criteria: Claims | None = None
    problem: str = ""


@cache
def read_verdicts() -> dict[str, Claims]:
    """Return C1 to C3 of every built-in rule and variant, by name.

    >>> read_verdicts()["bp"]
    Claims(c1=False, c2=True, c3=False)
    """
    text = resources.files("apical.plausibility").joinpath("verdicts.json").read_text("utf-8")
    return {rule: Claims(**verdict) for rule, verdict in json.loads(text).items()}


def judge_own_rule(rule: str, options: dict[str, Any]) -> str | None:
    """Audit a rule that is not built in, with the options of a run, and return the verdict as a store keeps it.

    Returns:
        JSON with c1, c2 and c3, or with `problem`, the reason why the audit failed; None for a built-in rule.
    """
    if rule in read_verdicts():
        return None
    known = resolve(rule)[0], rule, json.dumps(options, sort_keys=True)
    if known not in _JUDGED:
        _JUDGED[known] = _judge(rule, options)
    return _JUDGED[known]


_JUDGED: dict[tuple[type, str, str], str] = {}
"""Verdicts of this process. The class is part of the key: a rule that is defined again is audited again."""


def _judge(rule: str, options: dict[str, Any]) -> str:
    try:
        audit = audit_rule(rule, options=options)
    except Exception as error:  # whatever a user's rule raises is kept and shown beside its results
        first = (str(error).strip().splitlines() or [""])[0]
        return json.dumps({"problem": f"{type(error).__name__}: {first}"})
    return json.dumps({"c1": audit.c1, "c2": audit.c2, "c3": audit.c3})


def find_judgement(rule: str, stored: Iterable[str | None]) -> Judgement:
    """Return what is known of a rule: the recorded verdict if it is built in, else the last one stored with its runs.

    >>> find_judgement("bp", [])
    Judgement(criteria=Claims(c1=False, c2=True, c3=False), problem='')
    >>> find_judgement("mine", [None, '{"problem": "ValueError: too small"}'])
    Judgement(criteria=None, problem='ValueError: too small')
    """
    built_in = read_verdicts().get(rule)
    if built_in is not None:
        return Judgement(built_in)
    texts = [text for text in stored if text is not None]
    return parse_judgement(texts[-1]) if texts else Judgement()


def parse_judgement(text: str) -> Judgement:
    """Read a verdict as `judge_own_rule` writes it. Raises ValueError for any other text."""
    verdict = json.loads(text)
    if isinstance(verdict, dict) and verdict.keys() == {"c1", "c2", "c3"}:
        return Judgement(Claims(*(bool(verdict[name]) for name in Claims._fields)))
    if isinstance(verdict, dict) and verdict.keys() == {"problem"}:
        return Judgement(problem=str(verdict["problem"]))
    raise ValueError("its verdict was altered")
