# Needs python3 (3.10 or newer, with venv) and make; everything else goes into $(VENV).

# The one place that says which torch is installed: first, and alone, so that nothing else
# chooses it. Any pip arguments: make setup TORCH="torch --index-url https://..."
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
# A requirements file that the environment has beside the development tools; see test-frameworks.
REQUIREMENTS ?=
# Words added to the command of `make demo`, `make bench` and the test targets.
ARGS ?=
# The quick tests are shared by so many processes, one more than there are cores, as a third of their time
# is waiting for others; for one after the other in one: ARGS="-n 0".
SHARED := -n $(shell n=$$(getconf _NPROCESSORS_ONLN || echo 2); test $$n -lt 4 && expr $$n + 1 || echo 4) --dist worksteal

PY := $(VENV)/bin/python
# Bytecode is kept whatever the caller's environment says: without it each process that shares the
# tests compiles all of them anew, which takes it 12 s. `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE

# The environment is up to date when the stamp of these contents is there. Contents, not
# times: switching branches costs nothing, and a moved checkout is noticed.
KEY := $(shell { pwd; echo "$(PYTHON) $(TORCH)"; cat pyproject.toml bench/pyproject.toml scripts/setup.sh $(REQUIREMENTS); } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.ready-$(KEY)
# A stamp without an interpreter (the system's Python was replaced) counts for nothing.
ifneq ($(shell test -x "$(PY)" && echo yes),yes)
.PHONY: $(STAMP)
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint test-slow test-gpu test-frameworks framework-tests docs site bench \
	format clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make the environment (.venv); quick when it is there

$(STAMP): ; @REQUIREMENTS="$(REQUIREMENTS)" sh scripts/setup.sh "$(PYTHON)" "$(VENV)" "$@" $(TORCH)

demo: setup ## the main job: train, get killed four times, resume, compare every bit
	@$(VENV)/bin/everstep demo $(ARGS)

test: lint ## all quick checks: ruff, mypy, tidy tests, pytest
	$(PY) -m pytest -m "not slow and not gpu" $(SHARED) $(ARGS)

lint: setup ## ruff and mypy only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Tests of az:// need a program that only npm has; without it they are skipped, with that reason.
AZURITE := $(VENV)/azurite
test-slow: setup ## the tests that take longer
	@test -e $(AZURITE)/node_modules/.bin/azurite-blob || \
		npm install --silent --no-audit --no-fund --prefix $(AZURITE) azurite@3.35.0 || \
		echo "test-slow: npm did not install azurite: the tests of az:// are skipped"
	$(PY) -m pytest -m "slow and not gpu" -o faulthandler_timeout=1800 $(ARGS)

test-gpu: setup ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu -o faulthandler_timeout=600 $(ARGS)

test-frameworks: ## the tests on real Trainers and loaders, in an environment of their own
	@$(MAKE) VENV=.venv-frameworks REQUIREMENTS=tests/frameworks/requirements.txt framework-tests

framework-tests: setup
	$(PY) -m pytest tests/frameworks $(SHARED) -o faulthandler_timeout=600 $(ARGS)

docs: ## the documentation site (build/docs), in an environment of its own
	@$(MAKE) VENV=.venv-docs REQUIREMENTS=docs/requirements.txt site

site: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --clean

bench: setup ## how fast a state becomes durable, next to the disk's limit and to others
	$(VENV)/bin/everstep bench persist $(ARGS)

format: setup ## rewrite the sources as ruff wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove caches and build outputs; the environment stays
	rm -rf build dist bench/build bench/dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src bench scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	@for venv in "$(VENV)" .venv-docs .venv-frameworks; do \
		if [ -e "$$venv/pyvenv.cfg" ]; then rm -rf "$$venv"; fi; \
	done
