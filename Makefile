# make train   fine-tune the model that ships with flowtune
# make test    lint, types and the suite
# make test-slow the tests that make test leaves out: chaos, storage with faults, runs of several
#              processes
# make test-s3 the tests that need object storage, on a real S3 service they start themselves
# make learn   the examples that show that every algorithm learns, about ten minutes
# make bench   the engine beside raw PyTorch + PEFT
# make fuzz    hostile requests, six times as many as the suite tries, and others at each run
# make chaos   training runs under kill -9; `make chaos SEED=7 KILLS=20` repeats or shortens it

# The first Python that is new enough; `make PYTHON=...` takes another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v $$p && break; done)
CONFIG ?= examples/sft_arithmetic.yaml
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
KILLS ?= 50
INPUTS := pyproject.toml constraints.txt

.PHONY: help train test test-slow test-s3 learn bench fuzz chaos lint clean

help: ## show this
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-9s %s\n", $$1, $$2}'

train: .venv/.for-training ## fine-tune the shipped model: an adapter and a report under runs/
	$(BIN)/flowtune run $(CONFIG)

test: lint ## lint, types and the suite; it starts every server it needs
	$(BIN)/python -m pytest

test-slow: .venv/.for-tests ## the tests that make test leaves out; CI runs them behind it
	$(BIN)/python -m pytest -m slow

test-s3: .venv/.for-tests ## object storage on a real S3 service, faults on the way included
	$(BIN)/python -m pytest -m 'slow or not slow' -k s3 tests/backends/storage \
		tests/backends/engine/test_engine_checkpoints.py tests/flows/test_end_to_end.py

learn: .venv/.for-tests ## run the examples of every algorithm, and hold their held-out scores to a goal
	$(BIN)/python -m examples.learn

fuzz: .venv/.for-tests ## hostile requests: over 10,000, and others at each run
	FLOWTUNE_FUZZ=6 $(BIN)/python -m pytest --timeout=3600 tests/backends/engine/test_hostile_*.py

chaos: .venv/.for-tests ## kill training runs 50 times, and compare what they end with; prints its seed
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED))

bench: .venv/.for-training ## the engine beside raw PyTorch + PEFT; the machine has to be quiet
	$(BIN)/python -m benchmarks.engine

lint: .venv/.for-tests ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the environment and what tools left behind; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an installation is repeated only when what it was made from has changed.
.venv/.for-training: $(INPUTS) | .venv/.made
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/.for-tests: $(INPUTS) | .venv/.made
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@ .venv/.for-training

.venv/.made:
	@test -n '$(PYTHON)' || { echo 'flowtune needs Python 3.11 or newer, and found none: install one, or name it with make PYTHON=/path/to/python3' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@
