# Everything starts here: `make demo` and `make test` install what they need, on a fresh Debian machine too.
.DEFAULT_GOAL := help
SHELL := /bin/bash
# The distribution's own Python, if it is new enough and can make an environment (root gets what that needs by apt): it is
# built for speed, which one that pyenv has compiled is not by itself: `make test` takes a quarter less (CONTRIBUTING.md).
OWN := import os, sys; from importlib.util import find_spec; from shutil import which; \
  sys.exit(sys.version_info < (3, 11) or not (find_spec("ensurepip") or (os.getuid() == 0 and which("apt-get"))))
PYTHON ?= $(shell /usr/bin/python3 -c '$(OWN)' 2>/dev/null && echo /usr/bin/python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What the tests use beyond Python: real SSH servers, network namespaces, traffic shaping, a browser for the report, a
# compiler for the stand-in for CUDA, a Slurm cluster (deploy/slurm_lab.sh), the shells that people log in with.
DEBIAN := openssh-server rsync iproute2 nftables iperf3 chromium g++ slurmctld slurmd slurm-client munge procps util-linux \
  zsh fish tcsh

.PHONY: help demo test test-all chaos check docs bench gpu packages clean

help:
	@echo "make demo    train ResNet-152 on two nodes of this machine: up, run, collect"
	@echo "make test    every judgement, and one real run for each promise (those over a network need root)"
	@echo "make test-all   make test, then the others; THOROUGH=1 runs every case, and ten times the examples"
	@echo "make chaos   faults on purpose, by a seed: FAULTS=1000 SEED=7 (needs root)"
	@echo "make check   format, lint, types, layers"
	@echo "make docs    write docs/reference from the code, and build docs/ into one site: build/docs"
	@echo "make bench   the benchmarks under tests/bench"
	@echo "make gpu     tests and speeds on this machine's GPUs, 20 minutes: MNIST=~/data GPU_PARTS=alone,two (docs/gpu.md)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "the tests' packages need Python 3.11 or newer: name one, as PYTHON=python3.12"; exit 1)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || (rm -rf $(VENV); apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV))
	@echo "installing Python packages into $(VENV) of $$($(BIN)/python -V) ($$(readlink -f $(BIN)/python)); torch is large: minutes"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trainer,dev]' 2> >(grep -v "is ignored: it is neither" >&2)
	@touch $@

packages:
	@[ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || deploy/slurm_lab.sh install  # starts no service of Slurm
	@missing=""; for p in $(DEBIAN); do dpkg -s $$p >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing Debian packages:$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	elif [ -n "$$missing" ]; then echo "not root: tests that need$$missing are skipped"; fi

demo: $(READY)
	@export ORCH_HOME="$$PWD/runs/demo/home"; set -e; \
	$(BIN)/orch up inventory/local.yaml; \
	$(BIN)/orch run --exp resnet152_cifar --set data=synthetic --set steps=8 --set batch=8 --set lr=0.001 --set eval_every=0; \
	$(BIN)/orch collect --job latest --out runs/demo; \
	echo "look around: export ORCH_HOME=$$ORCH_HOME; remove it from ~/.orch-local: $(BIN)/orch down"

# Four at a time, each file's tests in their order: most of them wait for other processes, and with fewer the cores stood idle.
test: $(READY) packages
	$(BIN)/python -m pytest --workers 4 $(TESTS)

test-all: test
	$(BIN)/python -m pytest --workers 4 --rest

chaos: $(READY) packages
	$(BIN)/python -m tests.chaos --resume --faults $(or $(FAULTS),60) --seed $(or $(SEED),1)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy orchestrator trainer
	$(BIN)/python -m pytest -q tests/test_layers.py

docs: $(READY)
	$(BIN)/python docs/reference.py
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo "the site: build/docs/index.html"

bench: $(READY) packages
	@for script in tests/bench/*.py; do $(BIN)/python $$script || exit 1; done

# GPU_PYTHON: an environment that has torch with CUDA already, in place of .venv.
gpu: $(if $(GPU_PYTHON),,$(READY))
	@$(or $(GPU_PYTHON),$(BIN)/python) -m tests.gpu $(if $(GPU_PARTS),--parts $(GPU_PARTS)) $(if $(MNIST),--mnist $(MNIST)) \
	  $(if $(GPU_MINUTES),--minutes $(GPU_MINUTES))

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
