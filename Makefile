# make simulate   train a language model across eight simulated sites
# make test       run the tests
# make check      lint, types, import directions
# Everything is installed into $(VENV) first; nothing else on the machine is touched.

PYTHON ?= python3
VENV ?= .venv
READY = $(VENV)/.ready
BIN = $(VENV)/bin
SIMULATE ?=
PYTEST ?=

.PHONY: simulate test check clean

simulate: $(READY)
	$(BIN)/cloister simulate $(SIMULATE)

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(PYTEST)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p cloister
	$(BIN)/python -m pytest -q tests/test_imports.py

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than Python 3.11; name a newer one with PYTHON=" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
