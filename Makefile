# Set-up, demo and checks. `make` alone lists the targets.
#
# PYTHON names the interpreter that .venv is made from:  make PYTHON=python3.12 test
# ARGS is passed on to pytest:                           make test ARGS="tests/store -x"
# WORKERS is the number of parallel test processes:      make test WORKERS=0 ARGS=--pdb

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Made last: a set-up that was interrupted lacks it, and starts afresh.
READY := $(VENV)/.complete
PYTEST := $(BIN)/python -m pytest
WORKERS ?= logical
PARALLEL := -n $(WORKERS) --maxprocesses 4 --durations 10
# `make app` opens your own runs where there are some, and the samples where there are none.
RUNS ?= $(wildcard runs)

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(READY) ## Record two short runs and open them in the browser (SERVE=0: only record)
	$(BIN)/fsdp-inspect demo $(if $(filter 0,$(SERVE)),--no-serve)

.PHONY: app
app: $(READY) ## Open the dashboard on RUNS (default: runs/, or the samples)
	$(BIN)/fsdp-inspect app $(RUNS)

.PHONY: test
test: $(READY) ## Run the tests that guard a change (GPU tests are skipped without a GPU)
	$(PYTEST) $(PARALLEL) $(ARGS)

.PHONY: test-all
test-all: $(READY) ## Run all tests but the benchmarks: also the exhaustive ones, as CI does
	$(PYTEST) $(PARALLEL) --exhaustive $(ARGS)

.PHONY: coverage
coverage: $(READY) ## Measure line and branch coverage of all tests; takes longer than test-all
	$(BIN)/coverage erase
	$(PYTEST) $(PARALLEL) --exhaustive --cov --cov-report= $(ARGS)
	$(BIN)/coverage combine --quiet --append || true  # processes that ended after their test
	$(BIN)/coverage report

.PHONY: check
check: $(READY) ## Check format, lint, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo --no-cache

.PHONY: gate
gate: $(READY) ## Hold forecasts and a run against .ci/baselines (UPDATE=1: write them anew)
	.ci/gate $(if $(UPDATE),--update)

.PHONY: bench
bench: $(READY) ## Measure the published figures; takes minutes and wants an idle machine
	$(BIN)/python -m tests.benchmarks $(ARGS)

.PHONY: validate
validate: $(READY) ## Hold the simulator's predictions against runs under emulation; wants an idle machine
	$(BIN)/python -m tests.validation $(ARGS)

.PHONY: gpu
gpu: $(READY) ## Run and measure what needs a CUDA device (OUT=DIR: keep the table and a sample)
	$(PYTEST) -m gpu $(ARGS); tests=$$?; \
		$(BIN)/python -m tests.gpu $(if $(OUT),--out $(OUT)) && exit $$tests

.PHONY: samples
samples: $(READY) ## Record the CPU samples anew; wants an idle machine
	samples/record.sh

.PHONY: screenshots
screenshots: $(READY) ## Picture every page of the dashboard for the README, in Chromium
	$(BIN)/python -m tests.browser.gallery .github/images

.PHONY: constraints
constraints: ## Pin the newest versions that pyproject.toml allows; torch stays as it is pinned
	$(PYTHON) -m venv --clear build/constraints
	build/constraints/bin/python -m pip install "$$(grep '^torch==' constraints.txt)" -e '.[dev]'
	{ sed '/^[^#]/d' constraints.txt; build/constraints/bin/python -m pip freeze --all \
		--exclude pip --exclude-editable | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

.PHONY: clean
clean: ## Remove .venv, build products and caches; recorded runs stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A finished .venv is brought up to date in place; anything else is made from nothing.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "'$(PYTHON)' is missing or older than Python 3.11, which FSDP Inspect needs:" \
			"$$($(PYTHON) --version 2>&1). Install a newer one, or name it:" \
			"make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "'$(PYTHON)' cannot make virtual environments: its modules venv and ensurepip are" \
			"a package of their own on Debian and Ubuntu. Install it (apt-get install python3-venv)" \
			"and run make again." >&2; exit 1; }
	@if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear $(VENV); fi
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@
