PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BROWSED := $(VENV)/.browser

# Tests that run side by side.
JOBS ?= 2
HOSTS_TOOL ?= $(wildcard ../shared/tools/hosts.py)
DATA ?= $(wildcard ../shared/data/cifar10)

.PHONY: help demo test test-all lint bench reproduce soak browser pictures docs

help:
	@echo "make demo      six plans on scikit-learn's digits, two workers each, one report"
	@echo "make test      lint, types and the tests"
	@echo "make test-all  the slow tests too"
	@echo "make bench     Offbeat beside its peers, and docs/benchmarks.md; PARTS=\"throughput recovery\": only these"
	@echo "make reproduce the papers' figures and tables that have no results yet; ITEMS=dasgd-fig7: only these"
	@echo "make soak      half an hour of kills, cuts and newcomers under every protocol"
	@echo "make lint      lint, format check and types"
	@echo "make browser   a browser for the tests that open reports, where root has apt"
	@echo "make docs      the documentation's site, in build/docs"
	@echo "make pictures  the documentation's pictures of reports"

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

$(BROWSED): $(READY) .ci/browser
	.ci/browser $(BIN)/python
	touch $@

browser: $(BROWSED)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pictures: $(BROWSED)
	$(BIN)/python docs/pictures/make.py

test: lint browser
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow"

test-all: lint browser
	HOSTS_TOOL=$(HOSTS_TOOL) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

bench: $(READY)
	$(BIN)/python benchmarks $(PARTS) $(if $(HOSTS_TOOL),--hosts-tool $(HOSTS_TOOL)) $(if $(DATA),--data $(DATA))

reproduce: $(READY)
	$(BIN)/python reproduce $(or $(ITEMS),all) $(if $(DATA),--data $(abspath $(DATA)))

soak: $(READY)
	$(BIN)/python benchmarks/soak.py --minutes 30 $(if $(HOSTS_TOOL),--hosts-tool $(HOSTS_TOOL))
