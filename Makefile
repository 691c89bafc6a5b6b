# Everything from nothing but Python, make and git.
PYTHON ?= python3
BIN := .venv/bin

PYTEST := $(BIN)/pytest --numprocesses logical --maxprocesses 4 --dist worksteal

.PHONY: test test-all mutants lint pages bench perf docs clean

# Format, lint, types, every law and the coverage, in a few minutes: before every commit.
test: lint
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-fail-under=97

# And what is slow by nature, with many more random examples and the coverage of branches: before a release.
test-all: lint .venv/installed-all
	$(PYTEST) -m "slow or not slow" --hypothesis-profile=thorough --cov --cov-branch --cov-report=term:skip-covered --cov-fail-under=97

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Do the tests notice faults? Applies every mutation of tools/mutants and lists those that no test noticed.
mutants: .venv/installed
	$(BIN)/python tools/mutants/run.py

# Everything in README.md and docs/ that is computed from the results and the rules.
pages: .venv/installed
	$(BIN)/python -m tools.pages

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

# What only slow tests need: a cluster and a browser's driver.
.venv/installed-all: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,slow-tests]'
	touch $@

clean:
	rm -rf .venv site
