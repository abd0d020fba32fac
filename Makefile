# The two commands of the README: `make quickstart` and `make test`. Each sets up everything it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install quickstart lint test test-all benchmark clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# The stamp makes every target self-sufficient: it is newer than what it was installed from, or it is redone.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("isoloss needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

install: $(STAMP)  ## create .venv and install isoloss with its development tools

quickstart: $(STAMP)  ## train a small model on this machine's own text, two ranks, about two minutes
	$(BIN)/python recipes/prepare_quickstart.py
	$(BIN)/isoloss train recipes/quickstart.yaml --nproc 2

lint: $(STAMP)  ## format check, lint, strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: $(STAMP)  ## the test suite (under 20 minutes on 2 cores)
	$(BIN)/python -m pytest

test-all: $(STAMP)  ## the test suite with the slow tests
	$(BIN)/python -m pytest -m 'slow or not slow'

benchmark: $(STAMP)  ## cost of the loss path against a loop without it
	$(BIN)/python benchmarks/ledger_overhead.py

clean:  ## remove what the targets made
	rm -rf $(VENV) runs build .mypy_cache .ruff_cache .pytest_cache
