# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Later runs reuse $(VENV).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2

.PHONY: quickstart test lint small-target install install-dev clean

quickstart: install
	$(VENV)/bin/draft-jax quickstart $(ARGS)

test: install-dev lint small-target
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# For the tests on a real target; where it cannot be had they skip and say so.
small-target: install-dev
	-$(VENV)/bin/python -c "from target_bridge.small_target import obtain; obtain()"

install: $(VENV)/.installed-quickstart
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed-quickstart: pyproject.toml constraints.txt tools/install.sh
	PYTHON=$(PYTHON) tools/install.sh $(VENV) quickstart
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt tools/install.sh
	PYTHON=$(PYTHON) tools/install.sh $(VENV) quickstart,dev
	@touch $@ $(VENV)/.installed-quickstart

clean:
	rm -rf $(VENV) runs build dist *.egg-info
