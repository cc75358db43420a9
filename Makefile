# make demo, make test, make check, make bench: each prepares .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test check bench clean
help:            ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*##/	/' | expand -t 12

install: $(STAMP) ## prepare .venv with everything

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "fedcenters needs Python 3.10 or newer; pass PYTHON=python3.12" >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0" -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(STAMP)   ## twelve emulated devices, three centers, exported and handed to new devices
	$(BIN)/fedcenters-emulator demo

test: $(STAMP)   ## the tests
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not gpu and not board"

check: $(STAMP)  ## lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## measure what BENCHMARKS.md lists
	$(BIN)/python -m tests.bench

clean:           ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
