# Everything from nothing but Python, make and git.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test bench perf docs clean

test: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses logical --maxprocesses 4 --dist worksteal --cov --cov-report=term:skip-covered --cov-fail-under=90

bench: .venv/installed
	$(BIN)/apical bench --store runs/digits.sqlite --workers 2

perf: .venv/installed
	$(BIN)/python benchmarks/perf.py --growth runs/perf

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo open site/index.html

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv site
