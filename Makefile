# make simulate   train a language model across eight simulated sites
# make test       run the tests that take seconds
# make test-slow  run the rest: whole runs, meshes and audits, about a tenth of the tests
# make test-deployment   kill processes of a real deployment, cut its network, fill its disks; minutes, and partly as root
# make test-hour  sites join and leave for an hour, and the coordinator's memory, files and sockets stay what they were
# make check      lint, types, import directions, sizes
# make docs       generate docs/plan.md from protocol/plan/plan.py (tests/pages/plan_page.py)
# make proto      generate protocol/messages/door_pb2.py from protocol/messages/door.proto
# make peers      install pfl-research into .venv-pfl, for benchmarks/scale.py
# Everything else is installed into $(VENV) first; nothing else on the machine is touched.

PYTHON ?= python3
VENV ?= .venv
READY = $(VENV)/.ready
BIN = $(VENV)/bin
SIMULATE ?=
PYTEST ?=

.PHONY: simulate test test-slow test-deployment test-hour check docs proto peers clean

simulate: $(READY)
	$(BIN)/cloister simulate $(SIMULATE)

# More workers than the cores of a small machine: half of the time a test waits for processes that it started.
SUITE = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(SUITE) --numprocesses 4 -m 'not slow' $(PYTEST)

test-slow: $(READY)
	$(SUITE) --numprocesses 3 -m slow $(PYTEST)

test-deployment: $(READY)
	$(BIN)/python -m pytest -v tests/deployment/deployment_*.py $(PYTEST)

test-hour: $(READY)
	CLOISTER_HOUR=1 $(BIN)/python -m pytest -v -s tests/deployment/deployment_churn.py -k hour $(PYTEST)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p cloister
	$(BIN)/python -m pytest -q tests/test_imports.py tests/test_shape.py

docs: $(READY)
	$(BIN)/python -m cloister.tests.pages.plan_page > docs/plan.md

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -Iprotocol/messages --python_out=protocol/messages --pyi_out=protocol/messages door.proto

# pfl-research requires an older dp-accounting, so it has an environment of its own, with the versions that matter here.
PEERS = .venv-pfl
peers: $(PEERS)/.ready

$(PEERS)/.ready: constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet pfl==0.6.0 \
		$$(grep -E '^(torch|transformers|numpy|tokenizers|safetensors)==' constraints.txt)
	@touch $@

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than Python 3.11; name a newer one with PYTHON=" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
