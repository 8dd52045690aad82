# The fork's entry points. `make help` lists them; docs/patches.md explains the patch verbs.
.DEFAULT_GOAL := help
SHELL := /bin/bash

VENV := .venv
PY := $(VENV)/bin/python
# A release under ports/: test, tree, patches and check then work on that port.
PORT ?=
OWN_TREE := $(CURDIR)/build/$(if $(PORT),ports/$(PORT)/)tree
# Tests and examples import Megatron from here; name another patched checkout to use that instead.
MEGATRON_TREE ?= $(OWN_TREE)
# What examples and tools need may be newer than a port.
TESTS ?= $(if $(PORT),tests/unit_tests tests/support tests/functional_tests,tests)
ARGS ?=

export NO_VCS_VERSION := 1
export MEGATRON_TREE
export PYTHONPATH := $(CURDIR):$(MEGATRON_TREE)
# Bytecode may be cached: importing Megatron without it takes several times as long.
unexport PYTHONDONTWRITEBYTECODE

RUN_FORK = env -u PYTHONPATH $(PY) tools/fork.py $(if $(PORT),--port $(PORT))
# A foreign MEGATRON_TREE is used as it is; only our own tree is built.
SYNC_TREE = $(if $(filter $(OWN_TREE),$(MEGATRON_TREE)),$(RUN_FORK) tree,true)

.PHONY: help setup doctor demo docs test test-dist clients tree patches check rebase port bench bench-gpu

help:  ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup:  ## make .venv and install requirements.txt into it (done once, by every other target)
	@env -u PYTHONPATH bash tools/setup_env.sh $(VENV) requirements.txt
	@env -u PYTHONPATH $(PY) tools/doctor.py --quick

doctor: setup  ## say what is installed, which features it gives, what to install for the rest
	@$(SYNC_TREE)
	@$(PY) tools/doctor.py $(ARGS)

demo: setup  ## the same RL run with MTP heads frozen and trained online, on the CPU (ARGS=...)
	@$(SYNC_TREE)
	$(PY) -m examples.online_rl $(ARGS)

docs: setup  ## build the documentation site in build/site, strictly (ARGS=--serve)
	@$(SYNC_TREE)
	@$(PY) -m tools.docs_site build $(ARGS)

test: setup  ## run all tests on the CPU (TESTS=path, ARGS=..., PORT=x.y.z, MEGATRON_TREE=checkout)
	@$(SYNC_TREE)
	$(if $(PORT),,@env -u PYTHONPATH $(PY) tools/clients.py --if-possible)
	$(PY) -m pytest $(TESTS) $(ARGS)

test-dist: setup  ## run the torchrun suites only
	@$(SYNC_TREE)
	$(PY) -m pytest tests/functional_tests $(ARGS)

clients: setup  ## install RL frameworks from PyPI under build/clients, for the tests that drive them
	@env -u PYTHONPATH $(PY) tools/clients.py $(ARGS)

tree: setup  ## build or refresh build/tree: the pinned release with the series applied
	@$(RUN_FORK) tree $(ARGS)

patches: setup  ## rewrite patches/ from megatron/, tests/ and the commits of build/tree
	@$(RUN_FORK) patches $(ARGS)

check: setup  ## fail on any drift between fork.toml, patches/, the added files and upstream
	@$(RUN_FORK) check $(ARGS)

rebase: setup  ## try the series on another release: make rebase BASE=x.y.z
	@test -n "$(BASE)" || { echo "error: which release? make rebase BASE=x.y.z" >&2; exit 2; }
	@$(RUN_FORK) rebase $(BASE) $(ARGS)

port: setup  ## bring ports/x.y.z up to date with the series, or make it: make port PORT=x.y.z
	@test -n "$(PORT)" || { echo "error: which release? make port PORT=x.y.z" >&2; exit 2; }
	@env -u PYTHONPATH $(PY) tools/fork.py port $(PORT) $(ARGS)

bench: setup  ## measure the cost of the MTP objective beside unpatched Megatron (ARGS=--help)
	@$(SYNC_TREE)
	$(PY) -m tools.bench $(ARGS)

bench-gpu: setup  ## the same on CUDA, at the sizes of large models
	@$(SYNC_TREE)
	$(PY) -m tools.bench --device cuda $(ARGS)
