# Needs python3 (3.11 or newer) and a network. Stamps in .venv/stamps say what is done, so a second run has nothing to do.
PYTHON ?= python3
PYTEST_ARGS ?=
NEARCAST_COMPILE ?= 1
export NEARCAST_COMPILE

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PLAIN := build/plain
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Tests that reach into the hot modules, run a second time against their plain form.
HOT_TESTS := $(wildcard tests/unit tests/property tests/conformance tests/integration/test_smoke.py)

# What the compiled modules are made from. errors, config and clock count too: mypyc inlines their constants. The stamp's name
# holds the list of files, so that one which appears or goes away rebuilds as well; see "Two builds" in CONTRIBUTING.md.
HOT := $(wildcard $(addprefix src/nearcast/,$(shell grep -v '^\#' hot-modules.txt))) \
	src/nearcast/errors.py src/nearcast/config.py src/nearcast/fabricconfig.py src/nearcast/clock.py
HOT_NAMES := $(shell echo $(NEARCAST_COMPILE) $(sort $(HOT)) | cksum | cut -d' ' -f1)
COMPILED := $(STAMPS)/compiled-$(HOT_NAMES)

# A .venv that was interrupted, copied from elsewhere, or whose Python is gone is made anew.
VENV_OK := $(shell [ "$$(cat $(STAMPS)/venv 2>/dev/null)" = "$(CURDIR)" ] && $(BIN)/python -I -c '' 2>/dev/null && echo yes)
ifneq ($(VENV_OK),yes)
$(shell rm -f $(STAMPS)/venv)
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help install demo test test-compiled test-plain check bench lock clean tools

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done

install: $(COMPILED) ## make .venv with everything, so that .venv/bin/nearcast works
	@:

demo: install ## start a broker and clients, show messages flowing; ends by itself
	@$(BIN)/nearcast demo

test: install tools ## run the whole suite compiled, then what touches the hot modules plain
	@$(MAKE) --no-print-directory test-compiled
	@if $(EXPECTS_COMPILED); then $(MAKE) --no-print-directory test-plain; fi

test-plain: install tools ## run the tests of the hot modules against their plain Python form
	@rm -rf $(PLAIN) && mkdir -p $(PLAIN)
	@cp -R src/nearcast $(PLAIN)/ && find $(PLAIN) \( -name '*.so' -o -name '*.pyc' \) -exec rm -f {} +
	NEARCAST_EXPECT=plain PYTHONPATH="$(CURDIR)/$(PLAIN)" $(BIN)/python -m pytest $(PYTEST_ARGS) $(HOT_TESTS)

check: install ## ruff, mypy strict, and the import table
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

bench: install ## compare with the brokers that are installed; prints ratios, writes JSON
	@$(BIN)/nearcast bench compare

lock: ## write the newest versions that fit pyproject.toml to requirements.lock
	@$(CHECK_PYTHON)
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	NEARCAST_COMPILE=0 build/lock/bin/python -m pip --disable-pip-version-check install -qq -e '.[dev,lab,pipeline,java]'
	@{ sed -n '/^#/p' requirements.lock; \
		build/lock/bin/python -m pip --disable-pip-version-check freeze --exclude-editable --exclude pip --all; } >build/requirements.lock
	@mv build/requirements.lock requirements.lock && rm -rf build/lock
	@echo "requirements.lock is written; 'make test' tells whether these versions work"

clean: ## remove everything that make made
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/integration/js/node_modules
	rm -f src/*.so && find src -name '*.so' -exec rm -f {} +
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# --- how the targets above get there ---

# With a compiler and headers the compiled build is what is tested, and failing to compile fails the tests.
EXPECTS_COMPILED = [ "$(NEARCAST_COMPILE)" != 0 ] && command -v "$${CC:-cc}" >/dev/null 2>&1 && \
	[ -e "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]

test-compiled: install tools
	@if $(EXPECTS_COMPILED); then expect=compiled; else expect=plain; echo "no C compiler: testing the plain build only"; fi; \
		set -x; NEARCAST_EXPECT=$$expect $(BIN)/python -m pytest $(PYTEST_ARGS)

tools:
	@scripts/test-tools.sh

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "nearcast needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }

$(STAMPS)/venv:
	@$(CHECK_PYTHON)
	@echo "making $(VENV)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS) && printf '%s' "$(CURDIR)" >$@

# Without build isolation, and uncompiled: the compiling below then happens once, with the versions of the lock.
$(STAMPS)/installed: $(STAMPS)/venv pyproject.toml requirements.lock setup.py hot-modules.txt
	@echo "installing packages"
	@$(PIP) install -qq -c requirements.lock setuptools mypy
	@NEARCAST_COMPILE=0 $(PIP) install -qq -c requirements.lock --no-build-isolation -e '.[dev,lab,pipeline,java]'
	@touch $@

# The stamp is dated before compiling starts: a source saved meanwhile is newer, and the next make compiles again.
$(COMPILED): $(STAMPS)/installed $(HOT)
	@rm -f $(STAMPS)/compiled-*; mkdir -p build; touch $(STAMPS)/new
	@[ "$(NEARCAST_COMPILE)" = 0 ] || echo "compiling the hot modules"
	@$(BIN)/python setup.py -q build_ext --inplace --force >build/compile.log 2>&1 || { cat build/compile.log >&2; exit 1; }
	@grep '^nearcast: ' build/compile.log >&2 || true
	@! grep -q '^nearcast: .*compiling failed' build/compile.log || echo "details: build/compile.log" >&2
	@mv $(STAMPS)/new $@
