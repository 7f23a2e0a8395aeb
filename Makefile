PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint bench docs clean

## make demo: install, then train a real model under four policies, with one slow worker, and compare them
demo: $(READY)
	$(BIN)/paceline compare examples/digits.toml --when bsp --when quorum:3 --when ssp:3 --when asp

## make test: every check
test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m docs.make --check

## make bench: every timed claim, with its target
bench: $(READY)
	$(BIN)/python -m benchmarks all

## make docs: the table of policies, in the README and in docs/, from their declarations
docs: $(READY)
	$(BIN)/python -m docs.make

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
