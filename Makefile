# Every command of the project. `make test` and `make compare` need nothing but Python 3.11 to 3.13 and make.
#
#   make test ARGS="-k covariance"     pass arguments to pytest
#   make test PYTHON=python3.12        the interpreter that .venv is made with, when there is none yet
#   make test-torch VERSION=2.10       the tests with another torch, in .venv-torch-2.10

PYTHON ?= python3
ARGS ?=
VENV := .venv
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
PIP := $(RUN) pip --disable-pip-version-check install --no-compile
PYTEST := OMP_NUM_THREADS=1 $(RUN) pytest
PARALLEL := -n 2 --dist worksteal
SHARE ?= $(shell echo $$((0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0) % 1000)))

# Bytecode of torch that is not kept is made anew in every process, and there are many: half a minute for each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help install test test-deep test-share test-torch test-wheel bench lint format notebooks docs docs-look docs-check compare clean distclean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## Make .venv and install the library and its commands into it.
	@echo "Now: . $(VENV)/bin/activate, and pyro-dropout --help"

test: $(VENV)/.installed-dev ## Run the tests (and set everything up first, on a fresh machine).
	$(PYTEST) $(PARALLEL) $(ARGS)

test-deep: $(VENV)/.installed-dev ## Run the long tests as well, with 5,000 examples to a property.
	HYPOTHESIS_PROFILE=deep $(PYTEST) $(PARALLEL) -m "" $(ARGS)

test-share: $(VENV)/.installed-dev ## Run a fifth of the long tests, another for each commit, for three minutes.
	SHAPE_CHECKS=deep $(PYTEST) -n 2 -m deep --share $(SHARE)/5 --begin-within 180 $(ARGS)

test-wheel: $(VENV)/.installed-dev ## Build the library, install it into an empty environment, and test it there.
	@$(RUN) tests.wheel $(ARGS)

test-torch: ## Run the tests with another torch, in an environment of its own (VERSION=2.10).
	@[ -n "$(VERSION)" ] || { echo "Name a version of torch, for example: make test-torch VERSION=2.10" >&2; exit 1; }
	$(MAKE) test VENV=.venv-torch-$(VERSION) TORCH=$(VERSION)

bench: $(VENV)/.installed-dev ## Measure speed beside other libraries (ARGS=--quick: in a few minutes).
	$(RUN) tests.benchmarks $(ARGS)

lint: $(VENV)/.installed-dev ## Check style, format and types.
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(VENV)/.installed-dev ## Rewrite the code in the house format.
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

notebooks: $(VENV)/.installed-notebooks ## Run the notebooks and write them as .ipynb with their outputs (ARGS=--short).
	$(BIN)/python docs/make_notebooks.py $(ARGS)

docs: $(VENV)/.installed-docs ## Build the figures and the documentation into docs/_build/html.
	@if [ -f docs/make_figures.py ]; then echo "$(BIN)/python docs/make_figures.py"; $(BIN)/python docs/make_figures.py; fi
	$(RUN) sphinx -W --keep-going -b html docs docs/_build/html

docs-look: ## Look at the built pages in Chromium, at phone and desk width (ARGS=FOLDER: keep pictures).
	$(BIN)/python docs/look.py $(ARGS)

docs-check: $(VENV)/.installed-dev ## Check the pages: links, examples, counts, numbers that commands print (ARGS='-m ""': slow examples too).
	$(PYTEST) $(PARALLEL) tests -k "test_documents or page" $(ARGS)

compare: $(VENV)/.installed ## Compare posterior approximations on CO2, into out/compare (ARGS=my.csv: on a table).
	$(BIN)/pyro-dropout compare --out out/compare $(ARGS)

clean: ## Remove caches and built documents; keep the virtual environment.
	rm -rf docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environments too.
	rm -rf $(VENV) .venv-torch-*

# The virtual environment. It is trusted when its stamp names this folder (a copied or moved one still installs from
# the old place), its interpreter answers, and every package in it was installed to the end: pip writes INSTALLER among
# the last files of a package, and keeps a name that starts with ~ only while it replaces one. Else it is made anew.
WHOLE := $(shell [ "$$(cat $(VENV)/.made 2>/dev/null)" = "$(CURDIR)" ] && $(BIN)/python -c "import pip" 2>/dev/null \
	&& for d in $(VENV)/lib/python3*/site-packages/*.dist-info; do [ -f "$$d/INSTALLER" ] || exit 1; done \
	&& ! ls -d $(VENV)/lib/python3*/site-packages/~* >/dev/null 2>&1 && echo yes)
ifneq ($(WHOLE),yes)
.PHONY: $(VENV)/.made
endif

$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))" 2>/dev/null || { \
	  echo "pyro_dropout needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is: $$($(PYTHON) --version 2>&1 | head -n 1)." \
	    "Name another one, for example: make PYTHON=python3.12 test" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@echo "$(CURDIR)" > $@

# Python keeps the bytecode of what it imports. That of all packages takes minutes; the first import of what the
# commands need takes seconds, and would otherwise be waited for by the first fit.
PREPARE := $(RUN:-m=-c) "import matplotlib.figure, pyro_dropout.cli.main, pyro_dropout.tabular.fit_table"
# What every process of the tests imports besides; two that start together would each make all of it.
PREPARE_DEV := $(PREPARE:"=, arviz, beartype, hypothesis, sklearn.ensemble, torch._inductor")

# What another torch is tested with: this version of it, and everything else as it is.
$(VENV)/constraints.txt: $(VENV)/.made constraints.txt
	sed 's/^torch==.*/torch==$(TORCH).*/' constraints.txt > $@

# Stamps are written last, so an interrupted installation is simply done again.
$(VENV)/.installed: $(VENV)/.made pyproject.toml $(PINS)
	$(PIP) -c $(PINS) -e ".[tables]"
	$(PREPARE)
	@touch $@

$(VENV)/.installed-%: $(VENV)/.made pyproject.toml $(PINS)
	$(PIP) -c $(PINS) -e ".[$*]"
	$(if $(filter dev,$*),$(PREPARE_DEV))
	@touch $(VENV)/.installed $@
