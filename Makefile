# One command each; every target sets up .venv first. Nothing is installed again while the pins stay the same.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The CUDA set where nvidia-smi answers, the CPU set elsewhere; `make test DEVICE=cpu` decides by hand.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# The packages: requirements/$(STACK).txt. `make test STACK=oldest` takes the oldest releases that evenrank runs with, and
# STACK=newest the newest, on the CPU.
STACK  ?= $(DEVICE)
ifneq ($(filter oldest newest,$(STACK)),)
DEVICE := cpu
endif
# Further arguments for the program behind a target: make test ARGS="tests/unit -k plan", make bench ARGS=--quick.
ARGS ?=
# Test files that run at once. Most of a test's time is waiting for ranks, so that two cores take three.
WORKERS ?= 3
# Further arguments for pip, such as an index that holds the CPU build of torch.
PIP_ARGS ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
STAMP  := $(VENV)/.installed-$(STACK)

.PHONY: help install demo demo-sid test test-slow test-repeat test-sanitized test-extras coverage bench lint format docs clean
help: ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t13

install: $(STAMP) ## Make .venv and install evenrank with its pinned dependencies

NATIVE := setup.py $(wildcard ci/build_backend/*.py commons/perf_model/partitioner/native/* commons/perf_model/partitioner/sources.py)
# The wheel that holds a compiler, where there is none.
ZIGLANG := $(shell command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	sed -n 's/^ZIGLANG = "\(.*\)"/\1/p' ci/build_backend/evenrank_build.py)

$(STAMP): requirements/$(STACK).txt requirements/common.txt requirements/dev.txt pyproject.toml $(NATIVE)
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
		{ echo "error: $(PYTHON) is no Python of 3.10 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	@test -x $(BIN)/pip || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the $(STACK) set (a minute or two, once)"
	@$(PIP) install $(PIP_ARGS) "$$(grep '^torch==' requirements/$(STACK).txt)"
	@$(PIP) install $(PIP_ARGS) --no-deps -r requirements/$(STACK).txt -r requirements/dev.txt
	@test -z "$(ZIGLANG)" || $(PIP) install $(PIP_ARGS) $(ZIGLANG)
	@$(PIP) install $(PIP_ARGS) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.installed-* && touch $@

demo: $(STAMP) ## Train HSTU on two ranks, unbalanced and balanced, side by side
	@ci/demo.sh $(BIN) $(DEVICE) $(ARGS)

demo-sid: $(STAMP) ## The same for SID-GR, which also generates items and is evaluated on them
	@ci/demo.sh --model sid_gr $(BIN) $(DEVICE) $(ARGS)

# Compiled tests are kept: else every process of the suite compiles them and evenrank anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := -m pytest -n $(WORKERS) --dist loadfile

test: $(STAMP) ## Run the tests, all but the slow ones: before each commit
	@$(BIN)/python $(PYTEST) -m "not slow" $(ARGS)

test-slow: $(STAMP) ## Run the slow tests, which `make test` leaves out
	@$(BIN)/python $(PYTEST) -m slow $(ARGS)

# How often `make test-repeat` runs the tests.
RUNS ?= 20
test-repeat: $(STAMP) ## Run `make test` RUNS times in a row, up to the first failure
	@ci/repeat_tests.sh $(RUNS)

test-sanitized: $(STAMP) ## Run the planner's tests with a native core that finds reads outside arrays and overflows
	@ci/test_sanitized.sh $(ARGS)

EXTRAS := $(VENV)/.installed-extras
$(EXTRAS): $(STAMP) requirements/extras.txt requirements/rl.txt
	@echo "installing the extras"
	@$(PIP) install $(PIP_ARGS) --no-deps -r requirements/extras.txt
	@$(PIP) install $(PIP_ARGS) --no-deps -r requirements/rl.txt
	@touch $@

test-extras: $(EXTRAS) ## Install Ray, TorchX, trackers and training frameworks, and run their tests
	@$(BIN)/python -m pytest tests/extras $(ARGS)

coverage: $(STAMP) ## Run all tests and say how much of commons they run, the ranks' processes counted
	@$(BIN)/python -m coverage erase
	@# By its whole path: a process that changes its folder would leave its part there.
	@COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/python -m coverage run $(PYTEST) $(ARGS); status=$$?; \
		$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report || exit 1; exit $$status

bench: $(STAMP) ## Run the benchmarks; results go to benchmarks/results
	@ci/bench.sh $(BIN) $(ARGS)

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(STAMP) ## Format the code and fix what ruff can
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

DOCS := $(VENV)/.installed-docs
$(DOCS): $(STAMP) requirements/docs.txt
	@echo "installing what builds the documentation"
	@$(PIP) install $(PIP_ARGS) --no-deps -r requirements/docs.txt
	@touch $@

docs: $(DOCS) ## Build the documentation; a link that leads nowhere is an error
	@# The variable is the theme's: it speaks of other matters at every start. With --quiet, warnings would not count.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "open $(CURDIR)/site/index.html"

clean: ## Remove .venv, caches, run folders and the built documentation
	rm -rf $(VENV) runs build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
