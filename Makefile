# `make help` lists the targets. Each virtual environment is made once and
# again when setup.py, the package or a script that makes it changes.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Empty: scripts/find_python.sh looks for a Python 3.10 to 3.12.
PYTHON ?=
# Passed on to pytest: make test PYTEST_ARGS="-k launch"
PYTEST_ARGS ?=
# The demo's number of processes.
NUM_PROCESSES ?= 2

# Set here because a user's own ~/.keras/keras.json may name another one.
export KERAS_BACKEND := tensorflow

NEW := .venv
HOROVOD := .venv-horovod
OLDEST := .venv-oldest
DOCS := .venv-docs
SOURCES := setup.py pyproject.toml README.md \
	$(shell find keras_sparsity -name '*.py' -o -name '*.md')

# Made side by side.
ENVIRONMENTS := $(HOROVOD)/.installed $(NEW)/.dev
# The others take half a minute to collect.
SMOKE = -m smoke $(shell grep -rl --include='test_*.py' mark.smoke tests)
# See pytest_collection_modifyitems.
TWO_AT_ONCE := -n 2 --dist loadgroup --no-loadscope-reorder

.PHONY: help demo test test-long test-all test-newest test-oldest environments \
	browser sshd docs lint format bench clean

help:  ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | \
		sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 22

demo: $(NEW)/.installed  ## Train the tutorial's language model on 2 processes
	$(NEW)/bin/keras-sparsity run -n $(NUM_PROCESSES) \
		tutorials/language_model.py

test:  ## The tests, on all engines
	$(MAKE) --no-print-directory -j2 $(ENVIRONMENTS)
	$(HOROVOD)/bin/python -m pytest $(TWO_AT_ONCE) $(PYTEST_ARGS)

test-long:  ## And those that take long, as in CI: an hour
	$(MAKE) --no-print-directory -j2 $(ENVIRONMENTS)
	$(HOROVOD)/bin/python -m pytest $(TWO_AT_ONCE) \
		-m "not all_cells" $(PYTEST_ARGS)

test-all:  ## And the whole matrix: hours
	$(MAKE) --no-print-directory -j2 $(ENVIRONMENTS)
	$(HOROVOD)/bin/python -m pytest $(TWO_AT_ONCE) \
		-m "all_cells or not all_cells" $(PYTEST_ARGS)

test-newest: $(NEW)/.dev  ## The smoke tests on the newest versions
	$(NEW)/bin/python -m pytest $(TWO_AT_ONCE) $(SMOKE)

test-oldest: $(OLDEST)/.dev  ## The smoke tests on the oldest versions
	$(OLDEST)/bin/python -m pytest $(TWO_AT_ONCE) $(SMOKE)

# Those that build this package in the source tree do so one after the other.
environments:  ## All virtual environments, side by side
	$(MAKE) --no-print-directory -j3 \
		$(NEW)/.dev $(DOCS)/.installed $(HOROVOD)/.horovod
	$(MAKE) --no-print-directory $(OLDEST)/.dev $(HOROVOD)/.installed

# Where it cannot be installed, what needs it is skipped; the script says why.
test test-long test-all: browser sshd
browser sshd:
	@scripts/install_$@.sh || true

# Two runs of apt-get do not wait for each other.
sshd: | browser

# Strict: a broken link or an unknown name ends it. The variable turns the
# generator's advertisement off.
docs: $(DOCS)/.installed  ## Build the documentation's site into site/
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "Open site/index.html"

lint: $(NEW)/.dev  ## Ruff, the direction of imports, public docstrings
	$(NEW)/bin/ruff check .
	$(NEW)/bin/ruff format --check .
	$(NEW)/bin/lint-imports --no-logo --no-cache
	$(NEW)/bin/python scripts/counts.py --check

format: $(NEW)/.dev  ## Let ruff mend what it can
	$(NEW)/bin/ruff check --fix .
	$(NEW)/bin/ruff format .

# Some stand beside Horovod; those of an emulated cluster need root.
# before_after.py needs a second checkout.
bench: $(NEW)/.installed $(HOROVOD)/.installed  ## Every benchmark
	set -e; for benchmark in benchmarks/[a-z]*.py; do \
		python=$(NEW)/bin/python; \
		case $$benchmark in */before_after.py) continue;; \
			*/all_to_all.py|*/scaling.py|*/jobs.py|\
		*/layer_placement.py|*/pipeline.py) python=$(HOROVOD)/bin/python;; esac; \
		echo "== $$benchmark"; $$python $$benchmark; done

clean:  ## Remove the virtual environments and what the tools wrote
	rm -rf $(NEW) $(HOROVOD) $(OLDEST) $(DOCS) site build dist *.egg-info \
		.pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The site's generator; it reads the source and needs no TensorFlow.
$(DOCS)/.installed: docs/requirements.txt
	@echo "Making $(DOCS) ..."
	@python="$$(scripts/find_python.sh $(PYTHON))" && \
		"$$python" -m venv $(DOCS)
	@scripts/pip_install.sh $(DOCS)/bin/python "the site's generator" \
		-r docs/requirements.txt
	@touch $@

# The newest TensorFlow, native engine.
$(NEW)/bin/python:
	@echo "Making $(NEW) ..."
	@python="$$(scripts/find_python.sh $(PYTHON))" && \
		"$$python" -m venv $(NEW)

$(NEW)/.installed: $(SOURCES) | $(NEW)/bin/python
	@scripts/pip_install.sh $(NEW)/bin/python \
		"TensorFlow and keras_sparsity" '.[cpu]'
	@touch $@

$(NEW)/.dev: $(NEW)/.installed
	@scripts/pip_install.sh $(NEW)/bin/python \
		"what tests need" '.[cpu,dev]'
	@touch $@

# The oldest versions that are supported, native engine.
$(OLDEST)/.dev: $(SOURCES)
	@echo "Making $(OLDEST) ..."
	@python="$$(scripts/find_python.sh $(PYTHON))" && \
		"$$python" -m venv $(OLDEST)
	@scripts/pip_install.sh $(OLDEST)/bin/python \
		"TensorFlow 2.16, Keras 3.5 and what tests need" \
		'tensorflow-cpu==2.16.*' 'keras==3.5.*' '.[dev]'
	@touch $@

# The newest TensorFlow that Horovod compiles with, and Horovod.
$(HOROVOD)/bin/python:
	@echo "Making $(HOROVOD) ..."
	@python="$$(scripts/find_python.sh $(PYTHON))" && \
		"$$python" -m venv $(HOROVOD)

$(HOROVOD)/.horovod: setup.py scripts/install_horovod.sh \
		| $(HOROVOD)/bin/python
	@scripts/pip_install.sh $(HOROVOD)/bin/python \
		"TensorFlow 2.18" 'tensorflow-cpu==2.18.*'
	scripts/install_horovod.sh $(HOROVOD)/bin/python
	@touch $@

# After the other one's: both build this package in the source tree.
$(HOROVOD)/.installed: $(SOURCES) $(HOROVOD)/.horovod | $(NEW)/.dev
	@scripts/pip_install.sh $(HOROVOD)/bin/python \
		"keras_sparsity and what tests need" '.[horovod,dev]'
	@touch $@
