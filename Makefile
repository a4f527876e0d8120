# `make lab` opens the notebooks, `make test` runs every test. Both make the environment in .venv first, once.

VENV := .venv
# Written only after everything is installed, so that an interrupted installation continues the next time.
READY := $(VENV)/.ready

PORT ?=
IP ?=
OPEN ?= 1
ARGS ?=
PIP_ARGS ?=

# The first one that really runs, because a name on the PATH may be a version manager's shim that only prints an error.
IN_RANGE := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.10; do \
	$$python -c '$(IN_RANGE)' >/dev/null 2>&1 && echo $$python && break; done)

.DEFAULT_GOAL := help
.PHONY: help lab test conformance bench screenshots check clean

help: ## print this list
	@echo 'make …'
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(firstword $(MAKEFILE_LIST))

lab: $(READY) ## open JupyterLab on the tour (PORT=8888, OPEN=0 for no browser, IP=0.0.0.0 in a container)
	@$(VENV)/bin/python -m dlab lab $(if $(PORT),--port $(PORT)) $(if $(IP),--ip $(IP)) \
		$(if $(filter 0 no false,$(OPEN)),--no-open)

test: $(READY) ## run all tests, notebooks included (ARGS="-k data" for some of them)
	@$(VENV)/bin/python -m tests.streams $(ARGS)

conformance: $(READY) ## run PyTorch's own distributed tests on gloo and on dlab, side by side (ARGS="-k reduce")
	@PYTHONPATH=tests $(VENV)/bin/python -m conformance $(ARGS)

bench: $(READY) ## measure this machine; without ARGS, write dlab/bench/RESULTS.md
	@$(VENV)/bin/python -m dlab.bench $(ARGS)

screenshots: $(READY) ## take the picture of the README again, in a real JupyterLab (needs Chromium)
	@PYTHONPATH=tests $(VENV)/bin/python -m screenshots

check: $(READY) ## lint, formatting, types
	@status=0; for tool in 'ruff check .' 'ruff format --check .' 'mypy'; do \
		$(VENV)/bin/python -m $$tool || status=1; done; exit $$status

clean: ## remove the environment and every cache
	@rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@$(or $(PYTHON),false) -c '$(IN_RANGE)' >/dev/null 2>&1 || { \
		echo 'dlab needs Python 3.10, 3.11 or 3.12: install one, or name it with make PYTHON=/path/to/python.' >&2; exit 1; }
	@$(VENV)/bin/python -c '' 2>/dev/null || rm -rf $(VENV)
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) >/dev/null || { \
		echo 'dlab needs the venv module of Python: on Debian and Ubuntu, apt install python3-venv.' >&2; exit 1; }
	@echo 'dlab: installing into $(VENV) (a few minutes, once; details in $(VENV)/install.log)'
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off $(PIP_ARGS) --editable '.[dev]' \
		>$(VENV)/install.log 2>&1 || { tail -n 20 $(VENV)/install.log >&2; exit 1; }
	@touch $@
