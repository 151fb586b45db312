# Two commands do everything on a fresh machine, as root: `make demo` and `make test`.
SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: demo test test-slow bench lab lab-shell lab-bench lint format envd blockd rust-test bootstrap bootstrap-dev stop clean

demo: bootstrap          ## Install what is missing, start a node, live one sandbox's whole life through the E2B SDK
	@$(PYTHON) examples/demo.py

test: bootstrap-dev lint rust-test ## Install what is missing, run linters and every test
	@$(PYTHON) -m pytest $(ARGS)

test-slow: bootstrap-dev  ## The tests that `make test` leaves out
	@$(PYTHON) -m pytest -m slow $(ARGS)

bench: bootstrap-dev     ## Measure the node against the raw operations
	@$(PYTHON) -m bench.run $(ARGS)

lab: bootstrap-dev       ## Run tests in a virtual machine that has KVM and ublk; ARGS are pytest's
	@$(PYTHON) -m lab test $(ARGS)

lab-shell: bootstrap-dev ## A shell in such a machine, or the command ARGS
	@$(PYTHON) -m lab shell $${ARGS:+"$$ARGS"}

lab-bench: bootstrap-dev ## Measure there, for each VMM, the node against the raw operations
	@$(PYTHON) -m lab bench $(ARGS)

lint: bootstrap-dev
	@$(VENV)/bin/ruff check src tests bench lab examples scripts
	@$(VENV)/bin/ruff format --check src tests bench lab examples scripts
	@$(VENV)/bin/mypy

format:
	@$(VENV)/bin/ruff check --fix src tests bench lab examples scripts
	@$(VENV)/bin/ruff format src tests bench lab examples scripts

bootstrap:
	@scripts/bootstrap.sh

bootstrap-dev:
	@scripts/bootstrap.sh --dev

envd:
	cd envd && cargo build --release --locked

blockd:
	cd blockd && cargo build --release --locked

rust-test: bootstrap-dev
	@cd envd && cargo test --locked --quiet
	@cd blockd && cargo test --locked --quiet

stop:                    ## Stop the node that `make demo` left running, and its sandboxes
	@$(PYTHON) examples/demo.py --stop

clean:
	rm -rf $(VENV) envd/target blockd/target .mypy_cache .ruff_cache .pytest_cache
