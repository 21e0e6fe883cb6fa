# Two commands do everything; each makes its environment from the pins when it is missing.
#   make demo   the whole path on a real MuJoCo task, in a few minutes on two cores
#   make test   the test suite
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint bench env clean

demo: $(READY)
	$(BIN)/burnish-demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed --json benchmarks/results/latest.json

env: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
