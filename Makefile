# Two commands do everything on a fresh machine, as root: `make demo` and `make test`.
SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: demo test bench lint format envd bootstrap bootstrap-dev stop clean

demo: bootstrap          ## Install what is missing, start a node, live one sandbox's whole life through the E2B SDK
	@$(PYTHON) examples/demo.py

test: bootstrap-dev lint ## Install what is missing, run linters and every test
	@$(PYTHON) -m pytest $(ARGS)

bench: bootstrap-dev     ## Measure the node against the raw operations
	@$(PYTHON) -m bench.run $(ARGS)

lint: bootstrap-dev
	@$(VENV)/bin/ruff check src tests bench examples
	@$(VENV)/bin/ruff format --check src tests bench examples
	@$(VENV)/bin/mypy

format:
	@$(VENV)/bin/ruff check --fix src tests bench examples
	@$(VENV)/bin/ruff format src tests bench examples

bootstrap:
	@scripts/bootstrap.sh

bootstrap-dev:
	@scripts/bootstrap.sh --dev

envd:
	cd envd && cargo build --release --locked

stop:                    ## Stop the node that `make demo` left running, and its sandboxes
	@$(PYTHON) examples/demo.py --stop

clean:
	rm -rf $(VENV) envd/target .mypy_cache .ruff_cache .pytest_cache
