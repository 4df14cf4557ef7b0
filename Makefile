# make demo   install into .venv if needed, then the main job on the checkpoint in the package
# make test   the same set-up, then the quick tests
# make check  what CI runs: linters, types, quick tests
# make story  every command of the README in an environment where nothing but ctxext was installed
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
WORKERS ?= 2
# Each test process computes on one thread, so that the workers do not fight for the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo test check fuzz slow story test-transformers-4 lint docs clean

demo: $(VENV)/installed
	$(BIN)/ctxext demo

test: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow and not engine"

check: lint test

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# FUZZ examples of each of the fuzzed kinds of file; `make test` runs a few, always the same.
FUZZ ?= 1000
fuzz: $(VENV)/installed
	CTXEXT_FUZZ=$(FUZZ) $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) tests/fuzz

slow: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) -m "slow and not engine"

story: $(VENV)/installed
	rm -rf .venv-story && $(PYTHON) -m venv .venv-story
	.venv-story/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) ".[search]"
	CTXEXT_BIN=$(CURDIR)/.venv-story/bin $(TEST_ENV) $(BIN)/python -m pytest -q tests/test_readme.py

test-transformers-4:
	$(MAKE) test VENV=.venv-transformers-4 CONSTRAINTS=constraints-transformers-4.txt

docs: $(VENV)/installed
	$(BIN)/python tools/make_docs.py

# pip finds a CPU build of the pinned torch where one is offered; elsewhere it takes the platform's default build.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-transformers-4 .venv-story demo-out .pytest_cache .mypy_cache .ruff_cache
