"""Biological plausibility, measured: the audit watches a rule's update and judges the three criteria."""

from apical.plausibility.judge import Audit, audit, verdicts

__all__ = ["Audit", "audit", "verdicts"]
