"""The bench: suites of runs, the store of their results, and tables that compare them with the paper."""

from apical.bench.declaration import Declaration, Request
from apical.bench.store import Row, Store
from apical.bench.workers import run

__all__ = ["Declaration", "Request", "Row", "Store", "run"]
