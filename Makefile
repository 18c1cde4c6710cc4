PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

HOSTS_TOOL ?= $(wildcard ../shared/tools/hosts.py)

.PHONY: help demo test test-all lint bench soak

help:
	@echo "make demo      six plans on scikit-learn's digits, two workers each, one table"
	@echo "make test      lint, types and the tests"
	@echo "make test-all  the slow tests too"
	@echo "make bench     throughput of every protocol against raw DDP and no communication"
	@echo "make soak      half an hour of kills, cuts and newcomers under every protocol"
	@echo "make lint      lint, format check and types"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/offbeat compare -n 2 examples/digits.py \
		--plans "bsp; local(period=4); dasgd; bsp:12.5% dasgd; asp; bsp:12.5% asp"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -q

bench: $(READY)
	$(BIN)/python benchmarks/throughput.py

soak: $(READY)
	$(BIN)/python benchmarks/soak.py --minutes 30 $(if $(HOSTS_TOOL),--hosts-tool $(HOSTS_TOOL))
