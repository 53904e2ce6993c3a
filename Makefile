# The project's commands. They need Python 3.11 or later, pip and make; everything else goes into .venv.
#
#   make demo    digits and a photograph, 4 ranks     make check   lint, types, layers, documentation
#   make test    all tests                            make bench   figures, beside their baselines
#   make docs    the site, in build/site              make clean   remove what these have made
#   make torture the tests of docs/reliability.md     make release sdist and wheel in dist, tested
#   make torture-busy some of these beside busy loops

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --python $(RUN) --quiet --disable-pip-version-check

# Benchmarks that need no GPU; each prints a table and writes benchmarks/results/*.json.
BENCHMARKS := $(filter-out benchmarks/record.py benchmarks/on_%.py benchmarks/gpu% benchmarks/scalapack.py \
    benchmarks/navier_stokes_peers.py,$(wildcard benchmarks/*.py))

.PHONY: help demo test torture torture-busy check docs bench release clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.has-demo
	@$(RUN) -m shardmath run -n 4 examples/digits.py
	@$(RUN) -m shardmath run -n 4 examples/photograph.py

# Three processes share the test files: while some wait or compute alone, others have a core. Bytecode
# is kept even if the environment says otherwise: without it, every process would compile everything anew.
test: $(VENV)/.has-test
	@PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n 3

# The battery, which writes docs/reliability.md; then ten times as many random cases as in `make test`,
# new ones in every run; then interrupts at every place, which take two to three hours of one core.
# `pytest -m torture tests/reliability/test_interrupts.py -k part07` is a 32nd of them.
torture: $(VENV)/.has-test
	@$(RUN) tests/battery.py
	@SHARDMATH_TEST_DRAWS=10 $(RUN) -m pytest -m hypothesis --timeout 3600 -n $$(nproc)
	@$(RUN) -m pytest -m torture tests/reliability/test_interrupts.py --timeout 3600 -n $$(nproc)

# Beside eight busy loops: the battery's short form, and then 200 kills and 500 mismatches in full, which
# replace the short form of their rows in the table.
torture-busy: $(VENV)/.has-test
	@$(RUN) tests/battery.py --busy 8 --short
	@$(RUN) tests/battery.py --busy 8 R1 R5

check: $(VENV)/.has-test $(VENV)/.has-lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest tests/test_layers.py
	@$(MAKE) --no-print-directory docs

# Built from scratch each time: Sphinx does not know which sources a docstring comes from. The reference
# needs torch.
docs: $(VENV)/.has-test $(VENV)/.has-docs
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --conf-dir docs/site \
	    --doctree-dir build/doctrees . build/site

bench: $(VENV)/.has-test
	@for file in $(BENCHMARKS); do echo; echo "== $$file"; $(RUN) "$$file" || exit; done

# PYTHONS="python3.11 python3.12 ..." names the Pythons whose C parts the wheel has; by default all that run here.
release:
	$(PYTHON) tools/release.py $(PYTHONS)

clean:
	rm -rf $(VENV) .*_cache .hypothesis build dist src/*.egg-info

# Installs one extra of pyproject.toml, and the package itself as an editable installation of src: once,
# and again when pyproject.toml or a C source changes.
$(VENV)/.has-%: pyproject.toml $(wildcard src/shardmath/*/*.c) $(RUN)
	@echo "installing shardmath[$*] into $(VENV)"
	@$(PIP) install --editable '.[$*]'
	@touch $@

# The environment has no pip of its own: $(PYTHON)'s pip installs into it, which is faster and needs no
# ensurepip.
$(RUN):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	    "shardmath needs Python 3.11 or later; this is " + sys.version + " (make PYTHON=... names another)")'
	@$(PYTHON) -m venv --without-pip $(VENV)
