# make demo    see it work: agreement of all installed frameworks, then "train short, test long" with its picture
# make test    a few minutes: each promise once        make test ARGS='-k bias'
# make test-all      every test        HYPOTHESIS_PROFILE=thorough make test-all
# make test-slow     what make test leaves out        make test-slow SHARD=1/8
# make test-drawn    the same answer everywhere, more of it        make test-drawn LIBRARY=mlx EXAMPLES=20000
# make test-oldest   a dozen tests of models with the oldest transformers that is supported
# make test-newest   models, and the examples of all pages, with the newest version of everything but PyTorch
# make upgrade    the newest versions into constraints.txt
# make lint    ruff and mypy
# make docs    the site, in out/site; a warning is an error
# make check   the conformance kit: is every installed backend ALiBi?
# make bench   speed and memory, against peers
# make build   what a release publishes, in dist, checked, and tried by itself
# Each sets up .venv by itself, with the versions of constraints.txt; users install without them.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL = $(RUN) -m pip --disable-pip-version-check install --quiet
PIP = $(INSTALL) --constraint constraints.txt
OUT ?= out

# The TPU's compiler is installed for the tests; where there is no accelerator, JAX need not look for one.
ifeq (,$(wildcard /dev/accel* /dev/vfio /dev/nvidiactl))
export JAX_PLATFORMS ?= cpu
endif

.PHONY: demo test test-all test-slow test-drawn test-oldest test-newest upgrade docs check lint format bench build clean
.DEFAULT_GOAL := test

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python must be 3.11 or newer, got " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[all,dev]'
	@touch $@

$(VENV)/ready-docs: $(VENV)/ready
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/oldest/ready: constraints-oldest.txt $(VENV)/ready
	$(INSTALL) --no-deps --upgrade --target $(@D) --requirement constraints-oldest.txt
	@touch $@

# PyTorch alone keeps its version: the newest may bring gigabytes of CUDA.
TORCH := $(shell grep ^torch== constraints.txt)
NEWEST := $(OUT)/newest/bin/python

$(OUT)/newest/ready: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(NEWEST) -m pip --disable-pip-version-check install --quiet '$(TORCH)' --editable '.[all,dev,docs]'
	@touch $@

demo: $(VENV)/ready
	$(RUN) -m benchmarks.agreement
	$(RUN) -m benchmarks.extrapolation --quick --output $(OUT)

# One thread a worker: two workers with two threads each only get in each other's way. Freed memory is kept: where the
# kernel is slow to give pages, to get them anew for every array takes a tenth of the time.
ENVIRONMENT = OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=100000000
PYTEST = $(ENVIRONMENT) $(RUN) -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test: $(VENV)/ready
	$(PYTEST) $(ARGS)

test-all: $(VENV)/ready
	$(PYTEST) -m '' $(ARGS)

test-slow: $(VENV)/ready
	$(PYTEST) -m slow $(if $(SHARD),--shard $(SHARD)) $(ARGS)

test-drawn: export EXAMPLES ?= 1000
test-drawn: $(VENV)/ready
	$(PYTEST) tests/test_same_answer_everywhere.py -k 'exact and $(LIBRARY)' --hypothesis-show-statistics $(ARGS)

test-oldest: export PYTHONPATH := $(VENV)/oldest
test-oldest: $(VENV)/oldest/ready
	$(RUN) -c 'from transformers import __version__ as found; assert found == "5.4.0", found'
	$(PYTEST) tests/torch/test_transformers.py tests/torch/test_encoder.py -k 'greedy or renamed or keep_their_shape or save or in_one_graph' $(ARGS)

test-newest: RUN := $(NEWEST)
test-newest: $(OUT)/newest/ready
	$(PYTEST) tests/torch/test_transformers.py tests/torch/test_encoder.py $(ARGS)
	$(PYTEST) -m '' tests/core/test_readme.py

upgrade:
	rm -f $(OUT)/newest/ready
	$(MAKE) $(OUT)/newest/ready
	{ grep '^#' constraints.txt; $(NEWEST) -m pip freeze --exclude-editable | sed 's|+cpu$$||'; } > $(OUT)/constraints.txt
	mv $(OUT)/constraints.txt constraints.txt

docs: $(VENV)/ready-docs
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going -c docs . $(OUT)/site
	@echo "The site: $(OUT)/site/index.html"

check: $(VENV)/ready
	$(RUN) -m alibi_core conformance $(ARGS)

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/ready
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(VENV)/ready
	$(RUN) -m benchmarks.bias --output $(OUT)
	$(RUN) -m benchmarks.attention --output $(OUT)
	$(RUN) -m benchmarks.attention --backend jax --output $(OUT)
	$(RUN) -m benchmarks.attention --backend mlx --output $(OUT)
	$(RUN) -m benchmarks.models --output $(OUT)
	$(RUN) -m benchmarks.parallel --output $(OUT)

# The wheel, the sdist and the golden vectors, by the wheel itself and its few dependencies.
build: RUN := $(OUT)/build/bin/python
build:
	rm -rf dist
	$(PYTHON) -m venv --clear $(OUT)/build
	$(PIP) build twine
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*.whl dist/*.tar.gz
	$(INSTALL) dist/*.whl
	$(RUN) -Im alibi_core slopes 8
	$(RUN) -Ic 'import alibi_core; print(alibi_core.bias(2, 3))'
	$(RUN) -Im alibi_core conformance alibi_core
	$(RUN) -Im alibi_core golden write dist/golden-vectors
	cd dist && $(PYTHON) -m zipfile --create alibi-golden-vectors.zip golden-vectors

clean:
	rm -rf $(VENV) $(OUT) dist .hypothesis .pytest_cache .mypy_cache .ruff_cache
