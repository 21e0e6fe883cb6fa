# Two commands do everything; each makes its environment from the pins when it is missing.
#   make demo   the whole path on a real MuJoCo task, in a few minutes on two cores
#   make test   the test suite; make test-all: with every combination of parts, instead of every pair of them
#   make site   these pages as a site with search and a reference, in site/; it needs no network to be read
# and, with every simulator and format package, of which robosuite needs a C compiler: make full, make test-full
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Kept byte code, also where the shell says otherwise: every worker and every process of a test imports the packages.
export PYTHONDONTWRITEBYTECODE :=
# Byte code is made when a module is first imported; most modules of the packages never are.
QUICK  := --quiet --no-compile
# Two workers on two cores: more threads of numpy or torch would wait for each other.
export OMP_NUM_THREADS := 1
TEST   := -m pytest -n 2 --dist worksteal -m "not gpu and not attack"

# The environment with everything: all extras of pyproject.toml, and what pip has to install without its dependencies.
FULL   := .venv-full
EXTRAS  = $(shell $(PYTHON) -c "import tomllib as t; \
    print(*t.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'], sep=',')")
NO_DEPS := robomimic d4rl gym metaworld

# What makes the site, without the package itself: the reference is read from the sources.
SITE  := .venv-site
DOCS   = $(shell $(PYTHON) -c "import shlex, tomllib as t; \
    print(shlex.join(t.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs']))")

.PHONY: demo test test-all test-full lint bench site env full clean

demo: $(READY)
	$(BIN)/burnish-demo

test: $(READY)
	$(BIN)/python $(TEST)

test-all: $(READY)
	$(BIN)/python $(TEST) --all

test-full: $(FULL)/.ready
	$(FULL)/bin/python $(TEST)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.speed

site: $(SITE)/.ready $(SITE)/node_modules
	NO_MKDOCS_2_WARNING=1 PATH="$(SITE)/bin:$$PATH" $(SITE)/bin/mkdocs build --strict

$(SITE)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install $(QUICK) -c constraints.txt $(DOCS)
	touch $(SITE)/.ready

# What the page of docs/draw runs in a browser; without npm the site is made without that page, and says so.
$(SITE)/node_modules: docs/draw/package.json docs/draw/package-lock.json
	mkdir -p $(SITE)
	cp $^ $(SITE)
	if command -v npm > /dev/null; \
	    then npm ci --prefix $(SITE) --ignore-scripts --no-audit --no-fund && touch $@; fi

env: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUICK) -c constraints.txt -e ".[dev]"
	touch $(READY)

full: $(FULL)/.ready

$(FULL)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FULL)
	$(FULL)/bin/python -m pip install $(QUICK) -c constraints.txt -e ".[$(EXTRAS)]"
	$(FULL)/bin/python -m pip install $(QUICK) -c constraints.txt --no-deps $(NO_DEPS)
	touch $(FULL)/.ready

clean:
	rm -rf $(VENV) $(FULL) $(SITE) site build *.egg-info
