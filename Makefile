# make demo   set up, then show which configs of the sparse-decode kernel each GPU can run
# make test   set up, then ruff, mypy and pytest
#
# PYTHON=python3.12   the interpreter that .venv is made with (3.10 or newer)
# SYSTEM_PYTHON=1     use PYTHON itself, which already has torch and triton; install nothing but this package

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup ready demo lint types test clean

PYTHON ?= python3
TORCH := torch==2.11.0
TRITON := triton==3.6.0
NUMPY := numpy<2.4

DEMO_KERNELS := smart_autotune.kernels.sparse_decode.tuning
DEMO_ARCHS := sm_90 sm_100 sm_120

# The stamp's name holds what the set-up depends on: another pyproject.toml or python is another stamp.
INPUTS := $(shell { cat pyproject.toml setup.py Makefile; command -v $(PYTHON); } | cksum | cut -d' ' -f1)

ifeq ($(SYSTEM_PYTHON),1)
PY := $(PYTHON)
STAMP := .system/ready-$(INPUTS)
# Only for a python that did not take the editable install; an empty folder otherwise.
export PYTHONPATH := $(CURDIR)/.system/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := .venv/bin/python
STAMP := .venv/ready-$(INPUTS)
endif

help:
	@sed -n 's/^# \?//p' Makefile | sed -n '1,/^$$/p'

setup ready: $(STAMP)
	@test ! -d .system/src/smart_autotune || ln -sfn "$(CURDIR)"/smart_autotune/* .system/src/smart_autotune/

.venv/ready-%:
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check '$(TORCH)' '$(TRITON)' '$(NUMPY)' -e '.[dev]'
	@rm -f .venv/ready-* && touch $@

# A read-only or externally managed python gets a folder of links on PYTHONPATH instead.
.system/ready-%:
	@for name in torch triton click rich packaging wrapt filelock; do \
	    $(PY) -c "import $$name" 2>/dev/null || { echo "SYSTEM_PYTHON=1: $(PY) has no $$name"; exit 1; }; done
	@rm -rf .system && mkdir -p .system/src
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . \
	    2>.system/pip.log || { \
	    echo 'SYSTEM_PYTHON=1: $(PY) does not take an install; using links on PYTHONPATH'; \
	    mkdir -p .system/src/smart_autotune && ln -s "$(CURDIR)/patches" .system/src/smart_autotune/patches; }
	@touch $@

demo: ready
	@$(PY) -m smart_autotune.cli audit $(DEMO_KERNELS) $(DEMO_ARCHS:%=--arch %)

# $(call tool,NAME,ARGUMENTS): a python that is not ours to fill may lack a tool; that is said, not hidden.
tool = @if $(PY) -c 'import $(1)' 2>/dev/null; then echo '$(1) $(2)'; $(PY) -m $(1) $(2); \
    elif [ '$(SYSTEM_PYTHON)' = 1 ]; then echo 'SKIPPED: $(PY) has no $(1)'; \
    else echo '$(PY) has no $(1)'; exit 1; fi

lint: ready
	$(call tool,ruff,check .)
	$(call tool,ruff,format --check .)

types: ready
	$(call tool,mypy)

test: lint types
	$(PY) -m pytest

clean:
	rm -rf .venv .system build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
