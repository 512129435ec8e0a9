# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Later runs reuse $(VENV).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
# A second environment: SGLang wants other versions of transformers and torch than the trainer.
SGLANG ?= 0.5.23
SGLANG_VENV ?= .venv-sglang

.PHONY: quickstart test test-main test-sglang lint small-target install install-dev install-sglang clean

quickstart: install
	$(VENV)/bin/draft-jax quickstart $(ARGS)

# One file is one worker's, so those that take longest start first: tests/conftest.py says which.
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TEST_MAIN = OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) $(ARGS)
TEST_SGLANG = OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python $(PYTEST) tests/sglang $(ARGS)

# pip and mypy use one core each, so both environments are made, and the code is checked, side by side.
test:
	$(MAKE) -j2 lint small-target install-sglang
	$(TEST_MAIN)
	$(TEST_SGLANG)

test-main: install-dev lint small-target
	$(TEST_MAIN)

# The real engine on the CPU; `make test-sglang SGLANG=0.5.16 SGLANG_VENV=.venv-sglang16` for the other version.
test-sglang: install-sglang small-target
	$(TEST_SGLANG)

lint: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# For the tests on a real target; where it cannot be had they skip and say so.
small-target: install-dev
	-$(VENV)/bin/python -c "from target_bridge.small_target import obtain; obtain()"

install: $(VENV)/.installed-quickstart
install-sglang: $(SGLANG_VENV)/.installed-$(SGLANG)
install-dev: $(VENV)/.installed-dev

PROJECT = pyproject.toml tools/pip.sh tools/requirements.py

$(VENV)/.installed-quickstart: $(PROJECT) constraints.txt tools/install.sh
	PYTHON=$(PYTHON) tools/install.sh $(VENV) quickstart
	@touch $@

$(VENV)/.installed-dev: $(PROJECT) constraints.txt tools/install.sh
	PYTHON=$(PYTHON) tools/install.sh $(VENV) quickstart,dev
	@touch $@ $(VENV)/.installed-quickstart

$(SGLANG_VENV)/.installed-$(SGLANG): $(PROJECT) tools/install_sglang_cpu.sh tools/sglang_cpu/$(SGLANG).txt tools/sglang_cpu/requirements.txt
	PYTHON=$(PYTHON) tools/install_sglang_cpu.sh $(SGLANG_VENV) $(SGLANG)
	@touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) runs build dist *.egg-info
