# Every target sets up what it needs, once: `make serve` on a fresh machine is all there is to do.
#
#   make serve                                   the sample model, one prefill and one decode instance
#   make serve MODEL=/path/to/model              a Hugging Face directory or a .gguf file
#   make serve ARGS="--decode 2 --port 9000"     any flag of `isthmus up`
#   make test ARGS="tests/unit/router -k ledger" part of the tests

VENV ?= .venv
MODEL ?=
ARGS ?=
# Two processes of one file each: two cores are what the default run is made for.
TEST_WORKERS ?= 2

PY := $(VENV)/bin/python
# `make gpu` takes a Python that has torch for CUDA, Triton, pytest and what Isthmus needs; it
# installs nothing.
GPU_PYTHON ?= $(PY)
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY)
SETUP := sh deploy/dev/setup.sh
PYTEST := $(RUN) -m pytest

.DEFAULT_GOAL := help
.PHONY: help serve test test-fast check dev fmt proto docs bench gpu e2e fault typepath clean setup-run setup-dev

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup-run:
	@$(SETUP) run $(VENV)

setup-dev:
	@$(SETUP) dev $(VENV)

serve: setup-run ## Start a cluster and serve its model (MODEL=, ARGS=); Ctrl-C stops it
	@exec $(PY) -m isthmus.cli.main up $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: setup-dev ## Run the default tests (ARGS= goes to pytest)
	$(PYTEST) $(if $(ARGS),$(ARGS),-n $(TEST_WORKERS) --dist loadfile)

test-fast: setup-dev ## Run the tests that start no process and no cluster
	$(PYTEST) -n $(TEST_WORKERS) --dist loadfile tests/unit tests/property $(ARGS)

e2e: setup-dev ## Run the tests that start whole clusters
	$(PYTEST) tests/e2e $(ARGS)

fault: setup-dev ## Run the tests that kill, stop or cut something
	$(PYTEST) -m "fault and not gpu and not multigpu" $(ARGS)

bench: setup-dev ## List the benchmarks, or run the one that ARGS= names
	$(RUN) benchmarks/run.py $(ARGS)

gpu: typepath ## Check and time kernels and steps on one GPU (minutes); writes a table
	PYTHONPATH=typepath $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

check: setup-dev ## Lint, types, layers, dependencies, contracts, spelling, generated files
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=typepath $(VENV)/bin/lint-imports --no-cache
	$(PY) -m deptry .
	$(VENV)/bin/buf lint
	$(VENV)/bin/codespell
	$(PY) deploy/dev/protos.py --check
	$(PY) deploy/dev/reference_docs.py --check

fmt: setup-dev ## Format and apply safe fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

proto: setup-dev ## Generate the protobuf code from protos/v1/*.proto
	$(PY) deploy/dev/protos.py

docs: setup-dev ## Generate the reference pages in docs/operations
	$(PY) deploy/dev/reference_docs.py

dev: setup-dev ## Set up for development: tools, import links, git hooks
	$(VENV)/bin/pre-commit install

typepath: ## Link the packages under typepath/isthmus for type checkers
	@$(SETUP) typepath $(VENV)

clean: ## Remove build outputs and caches (the virtual environment stays)
	rm -rf build dist typepath .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache htmlcov .coverage *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
