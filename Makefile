# The commands of this repository. Each sets up .venv first, from a pinned lock, when it is not up to date.

DEVICE ?= cpu
ARGS ?=
N ?= 10
VERSION ?=
RECIPE ?= $(if $(filter gpu,$(DEVICE)),grpo_smollm2_gpu,grpo_smollm2_cpu)

SHELL := /bin/bash
BIN := $(if $(filter core,$(DEVICE)),.venv-core,.venv)/bin
# The processes of a run import the same packages, which takes three times as long where Python may not keep its bytecode.
unexport PYTHONDONTWRITEBYTECODE
# Test processes are many and small: one thread each, and no thread that spins while it waits.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
# Which worker runs what, and in which order, is in conftest.py.
# Tests that start processes wait a quarter of their time, so a third worker has room on two cores; a fourth has not.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup train test test-core test-fast test-slow stress lint bench docs wheels release gpu-check gpu-rehearsal lock clean

help: ## list the targets
	@echo 'make TARGET [DEVICE=cpu|gpu|core|pretended-gpu] [ARGS="..."] [PYTHON=python3.11]'
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

setup: ## create or update .venv; every other target does so first
	@requirements/setup.sh $(DEVICE)

train: setup ## train a language model with GRPO; ARGS="--num-steps 5" overrides the recipe
	@exec $(BIN)/python -m controller.commands.cli run $(RECIPE) $(ARGS)

test-core: setup ## run the tests of the core; with DEVICE=core in .venv-core, where no plug-in is installed
	@exec env $(PYTEST) $(WORKERS) -m "not slow" tests $(ARGS)

test: setup ## run the tests on two cores, the core's first; ARGS="-k name" picks some, ARGS="-n 0" runs one after the other
	@exec env $(PYTEST) $(WORKERS) -m "not slow" $(ARGS)

test-fast: setup ## run the tests that start no process and take no seconds each
	@exec env $(PYTEST) $(WORKERS) -m "not slow and not e2e and not ranks and not vllm and not seconds" $(ARGS)

test-slow: setup ## run the tests that take longer than a minute each, and second proofs
	@exec env $(PYTEST) -m slow $(ARGS)

stress: setup ## run the tests that start processes N times, beside busy loops and as on lesser CPUs, and count failures
	@exec env $(TEST_ENV) $(BIN)/python -m tests.stress $(N) $(WORKERS) $(ARGS)

lint: setup ## check format, style and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright

bench: setup ## run every benchmark and rewrite benchmarks/RESULTS.md
	@exec $(BIN)/python -m benchmarks $(ARGS)

gpu-check: DEVICE = gpu
gpu-check: setup ## prove the GPU path on this machine, in 35 minutes at most; DEVICE=cpu only shows that the checks work
	@exec $(BIN)/python -m benchmarks.gpu_check --device $(DEVICE) $(ARGS)

gpu-rehearsal: ## run the GPU path on pretended GPUs, which need none; the first time, it installs 9 GB
	@requirements/setup.sh pretended-gpu
	@exec .venv-pretended-gpu/bin/python -m tests.gpu_pretended.rehearsal $(ARGS)

docs: ## make the site of docs/ and of the plug-ins' pages in .site/html; a broken link or an unlisted page fails
	@requirements/setup.sh docs
	@exec .venv-docs/bin/python docs/site/build.py

wheels: setup ## build the wheels of ownloop and of all plug-ins into dist/
	@rm -rf dist
	@for folder in . plugins/*/; do (cd "$$folder" && "$(CURDIR)/$(BIN)/python" -m hatchling build -t wheel -d "$(CURDIR)/dist") || exit 1; done

release: ## check, build and tag VERSION=0.2.0 of the core and all plug-ins, in a clone; nothing is uploaded
	@requirements/setup.sh release
	@exec .venv-release/bin/python requirements/release.py "$(VERSION)"

lock: ## resolve every pyproject.toml into requirements/*.lock again; ARGS=--upgrade takes newer versions
	@requirements/setup.sh lock $(ARGS)

clean: ## remove .venv and caches; runs/ stays
	@rm -rf .venv .venv-core .venv-docs .venv-release .site dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
