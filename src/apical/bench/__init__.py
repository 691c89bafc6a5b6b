"""The bench: suites of runs, the store of their results, and tables that compare them with the paper."""

from apical.bench.declaration import Declaration
from apical.bench.plan import Plan, plan, preview, run
from apical.bench.store import Row, Store
from apical.bench.suites import Choice

__all__ = ["Choice", "Declaration", "Plan", "Row", "Store", "plan", "preview", "run"]
