# Set-up, demo and checks. `make` alone lists the targets.
#
# PYTHON is the interpreter that creates .venv:        make PYTHON=python3.12 test
# ARGS is passed to pytest:                            make test ARGS="tests/store -x"
# WORKERS is the number of parallel test processes:    make test WORKERS=0 ARGS=--pdb

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
TRACKERS := .venv-trackers
# Created last: an interrupted set-up lacks this file and starts again.
READY := $(VENV)/.complete
PYTEST := $(BIN)/python -m pytest
WORKERS ?= logical
PARALLEL := -n $(WORKERS) --maxprocesses 4 --durations 10
# Chakra is not on PyPI.
CHAKRA ?= git+https://github.com/mlcommons/chakra@21585d8f2d65603d791d2121e3d4632351120262
# `make app` opens runs/ if it exists, otherwise the samples.
RUNS ?= $(wildcard runs)

# A test run starts hundreds of processes. Without bytecode files each compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

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
test: $(READY) ## Run the tests that guard a change (without a GPU, GPU tests are skipped)
	$(PYTEST) $(PARALLEL) $(ARGS)

.PHONY: test-changed
test-changed: $(READY) ## Run the tests of the changed modules (ARGS is passed to pytest)
	$(BIN)/python -m tests.changed -n $(WORKERS) --maxprocesses 2 $(ARGS)

.PHONY: test-all
test-all: $(READY) ## Run the exhaustive tests, too, as CI does every night
	$(PYTEST) $(PARALLEL) --exhaustive $(ARGS)

.PHONY: studies
studies: $(READY) ## Run the tests that repeat a measurement many times (CI runs them every night)
	$(PYTEST) $(PARALLEL) --exhaustive --studies -m study $(ARGS)

.PHONY: coverage
coverage: $(READY) ## Measure line and branch coverage of all tests; takes longer than test-all
	$(BIN)/coverage erase
	$(PYTEST) $(PARALLEL) --exhaustive --studies --cov --cov-report= $(ARGS)
	$(BIN)/coverage combine --quiet --append || true  # processes that ended after their test
	$(BIN)/coverage report

.PHONY: check
check: $(READY) ## Check format, lint, types, import directions and sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict --num-workers 2
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python .ci/sizes.py

.PHONY: sizes
sizes: $(READY) ## Write the sizes of the code to .ci/sizes.json (GAIN="...": what users get for more)
	$(BIN)/python .ci/sizes.py --write --gain "$(GAIN)"

.PHONY: gate
gate: $(READY) ## Compare forecasts and a run with .ci/baselines (UPDATE=1: rewrite the baselines)
	.ci/gate $(if $(UPDATE),--update)

.PHONY: bench
bench: $(READY) ## Measure the published figures (takes minutes; needs an idle machine)
	$(BIN)/python -m tests.studies.benchmarks $(ARGS)

.PHONY: validate
validate: $(READY) ## Compare predictions with runs under emulation (needs an idle machine)
	$(BIN)/python -m tests.studies.validation $(ARGS)

.PHONY: fuzz
fuzz: $(READY) ## Feed mutated inputs to all readers for SECONDS=600 (REPLAY=FILE: one failure again)
	$(BIN)/python -m tests.studies.fuzz $(if $(REPLAY),--replay $(REPLAY),--seconds $(or $(SECONDS),600)) $(ARGS)

.PHONY: chaos
chaos: $(READY) ## Kill recordings and break their disks at random moments for SECONDS=600
	$(BIN)/python -m tests.studies.chaos --seconds $(or $(SECONDS),600) $(ARGS)

.PHONY: faults
faults: $(READY) ## Inject 300 faults into trainings and judge the diagnoses (an hour)
	$(BIN)/python -m tests.studies.faults --cases 300 --healthy 100 $(ARGS)

.PHONY: planted
planted: $(READY) ## Check planted regressions and RERUNS=50 unchanged runs, and write docs/planted.md
	$(BIN)/python -m tests.studies.planted --reruns $(or $(RERUNS),50) --page docs/planted.md $(ARGS)

.PHONY: frameworks
frameworks: $(FRAMEWORKS)/.complete ## Record other training frameworks and write docs/frameworks.md (takes long)
	rm -rf build/frameworks
	FSDP_INSPECT_FRAMEWORKS=build/frameworks \
		$(FRAMEWORKS)/bin/python -m pytest -m frameworks tests/studies/frameworks $(ARGS); tests=$$?; \
		$(if $(ARGS),,$(FRAMEWORKS)/bin/python -m tests.studies.frameworks build/frameworks docs/frameworks.md &&) \
		exit $$tests

.PHONY: torch-matrix
torch-matrix: $(READY) ## Record and test with torch 2.9.1, 2.11.0, 2.13.0 and the newest, and write docs/versions.md
	$(BIN)/python -m tests.studies.torch_matrix $(ARGS)

.PHONY: trackers
trackers: $(TRACKERS)/.complete ## Log to wandb, MLflow, TensorBoard, Comet, Trackio and OpenTelemetry, offline
	$(TRACKERS)/bin/python -m pytest -m trackers tests/studies/trackers $(ARGS)

.PHONY: chakra
chakra: $(READY) ## Open exported steps with Chakra's own tools (CHAKRA=DIR: a checkout)
	$(PYTHON) -m venv --clear .venv-chakra
	.venv-chakra/bin/python -m pip install --no-deps '$(CHAKRA)'
	.venv-chakra/bin/python -m pip install graphviz networkx protobuf pydot
	FSDP_INSPECT_CHAKRA=.venv-chakra/bin $(PYTEST) tests/report/test_chakra.py $(ARGS)

.PHONY: gpu
gpu: $(READY) ## Test and measure on a CUDA device (OUT=DIR: keep the table and a sample)
	$(BIN)/python -m tests.gpu $(if $(OUT),--out $(OUT)) $(ARGS)

.PHONY: docs
docs: $(READY) ## Build the documentation site into build/site (a dead link fails the build)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: samples
samples: $(READY) ## Record the CPU samples again (needs an idle machine)
	samples/record.sh

.PHONY: screenshots
screenshots: $(READY) ## Take the README's pictures of every dashboard page, in Chromium
	$(BIN)/python -m tests.browser.gallery .github/images

.PHONY: constraints
constraints: ## Pin the newest versions that pyproject.toml allows, except torch
	$(PYTHON) -m venv --clear build/constraints
	build/constraints/bin/python -m pip install "$$(grep '^torch==' constraints.txt)" -e '.[dev]'
	{ sed '/^[^#]/d' constraints.txt; build/constraints/bin/python -m pip freeze --all \
		--exclude pip --exclude-editable | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

.PHONY: clean
clean: ## Remove virtual environments, build products and caches, but not recorded runs
	rm -rf $(VENV) $(FRAMEWORKS) $(TRACKERS) .venv-torch .venv-chakra build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A complete .venv is updated in place. An incomplete one is created again.
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

# The frameworks have a virtual environment of their own: they are heavy, and limit other versions.
$(FRAMEWORKS)/.complete: constraints-frameworks.txt pyproject.toml
	@if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear $(FRAMEWORKS); fi
	$(FRAMEWORKS)/bin/python -m pip install -c constraints-frameworks.txt -e '.[frameworks]'
	# The requirements of DeepSpeed bring a CUDA build of torch, and its build imports torch and ninja.
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(FRAMEWORKS)/bin/python -m pip install --no-build-isolation \
		--no-deps -c constraints-frameworks.txt deepspeed
	@touch $@

# The trackers are heavy, and limit other versions.
$(TRACKERS)/.complete: constraints-trackers.txt pyproject.toml
	@if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear $(TRACKERS); fi
	$(TRACKERS)/bin/python -m pip install -c constraints-trackers.txt -e '.[trackers]'
	@touch $@
