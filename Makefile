# Every target sets up what it needs; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
SOURCES := contract trainer sidecar operator cli tests examples images
PACKAGES := tidegate_contract tidegate tidegate_sidecar tidegate_operator tidegate_cli tidegate_ground tidegate_crash tidegate_demo
PYTEST := $(PY) -m pytest

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@echo "environment: $(VENV) from requirements/dev.txt (torch is a 5.6 GB install the first time)"
	@command -v uv >/dev/null || python3 -m pip install --quiet --root-user-action=ignore 'uv==0.13.8'
	@test -x $(PY) || uv venv --quiet --python 3.11 $(VENV)
	@uv pip sync --quiet --require-hashes --compile-bytecode --python $(PY) requirements/dev.txt
	@uv pip install --quiet --no-deps --no-build-isolation --python $(PY) -e .
	@touch $@

.PHONY: env
env: $(VENV)/.ready ## the Python environment in .venv, from hashed requirements

.PHONY: check
check: env ## format, lint, types, layers and sizes
	@$(VENV)/bin/ruff format --check --quiet $(SOURCES)
	@$(VENV)/bin/ruff check --quiet $(SOURCES)
	@$(VENV)/bin/mypy $(addprefix -p ,$(PACKAGES))
	@$(VENV)/bin/lint-imports --no-logo | tail -3
	@$(PYTEST) -q tests/house

.PHONY: format
format: env ## write the format that check wants
	@$(VENV)/bin/ruff format --quiet $(SOURCES)
	@$(VENV)/bin/ruff check --quiet --fix $(SOURCES)

.PHONY: crds
crds: env ## write crds/ and the chart's copies from the models
	@$(PY) -m tidegate_operator.crd crds charts/tidegate/files/crds

.PHONY: requirements
requirements: ## resolve requirements/*.txt anew (hashed, no index addresses)
	@compile() { uv pip compile --quiet --upgrade --generate-hashes --no-header --no-annotate \
		--python-version 3.11 pyproject.toml "$$@"; }; \
	compile --all-extras --group dev -o requirements/dev.txt; \
	compile --extra operator -o requirements/operator.txt; \
	compile --extra sidecar -o requirements/sidecar.txt

.PHONY: test-fast
test-fast: env ## every test that needs no cluster, on two workers
	@$(PYTEST) -q -n 2 --dist loadfile -m "not (ground or disk or long or torch_ranks)" tests

.PHONY: test-long
test-long: env ## enumerations, kills, power cuts, real ranks; no cluster, but root and loop devices
	@$(PYTEST) -q -n 2 --dist loadfile --durations=10 -m "(disk or long or torch_ranks) and not ground" tests

.PHONY: test
test: check ground-prepare test-fast test-long images ## everything, on a real cluster
	@$(PYTEST) -v --durations=10 -m ground tests

.PHONY: soak
soak: env ground-prepare images ## long counts; results go to benchmarks/results/
	@$(PYTEST) -m soak tests

.PHONY: ground-prepare
ground-prepare: env ## build the ground's programs and images once (11 to 30 minutes cold)
	@$(PY) -m tidegate_ground prepare

.PHONY: ground
ground: ground-prepare images ## a three-node Kubernetes on this machine, until ground-down
	@$(PY) -m tidegate_demo --only-ground
	@$(PY) -m tidegate_ground env

.PHONY: ground-down
ground-down: env ## remove the ground that `make ground` started
	@$(PY) -m tidegate_ground down

.PHONY: images
images: ground-prepare ## build the operator's and the sidecar's image
	@$(PY) images/build.py --base "$$($(PY) -c 'from tidegate_ground import sets; print(sets.image_archive("base"))')"

.PHONY: demo
demo: ground-prepare images ## a training job, a drain that waits for its save, and the timeline
	@$(PY) -m tidegate_demo
