# `make help` lists what a person calls. Everything is installed into .venv. Outside this folder lie caches (~/.cache:
# kvlab, pip, matplotlib) and what Jupyter keeps of its own: ~/.local/share/jupyter, ~/.jupyter, ~/.ipython.
PYTHON  ?= python3
ENGINE  ?= auto
PROFILE ?= auto
MACHINE ?=
EXECUTE ?=
BIN := .venv/bin
RUN := $(BIN)/kvlab
OPTIONS := --profile $(PROFILE) $(if $(MACHINE),--machine $(MACHINE)) $(if $(EXECUTE),--execute)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help report measure replay site test test-k8s test-browser workshop-check bench-client wheels lint lab routers install install-light clean

help: ## this list
	@awk -F':.*## ' '/^[a-z][a-z0-9-]*:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Options: PROFILE=name|file.toml  MACHINE=folder-name  ENGINE=auto|cuda|cpu  PYTHON=python3.12"
	@echo "           EXECUTE=1 (replay also what has not changed)"

report: install ## measure what is missing on this machine, then render _build/report.html
	$(RUN) report --mode auto $(OPTIONS)

measure: install ## measure everything on this machine again, then render the report
	$(RUN) report --mode measure $(OPTIONS)

replay: install-light ## render the report from the committed data; no vLLM, no GPU
	$(RUN) report --mode replay $(OPTIONS)

site: install-light ## _build/site: the report as static pages in two languages, from stored claims and figures
	$(RUN) site $(if $(MACHINE),--machine $(MACHINE))

test: install ## the whole test suite, real vLLM on the CPU included
	@$(RUN) router install vllm-router smg || echo "The tests of these routers are skipped."
	$(BIN)/python -m pytest

test-browser: install-light ## the report and JupyterLab in a headless Chromium, every board of sliders too
	KVLAB_BROWSER=1 $(BIN)/python -m pytest -m browser

test-k8s: install-light ## the Kubernetes code against a real control plane (root, Debian; the first time builds it: minutes)
	$(BIN)/python tests/control_plane.py

lint: install-light ## ruff over code and notebooks
	$(BIN)/ruff check . && $(BIN)/ruff format --check kvlab tests tools

routers: install ## the routers of notebook 12, each in a folder of its own (about 160 MB)
	$(RUN) router install vllm-router smg dynamo

workshop-check: install-light ## execute the workshop's exercises: with the solutions all pass, unanswered none does
	$(BIN)/python -m kvlab.workshop_check

bench-client: install-light ## the load generator against vllm bench, guidellm and aiperf on one null server (about 8 GB, 20 minutes)
	$(BIN)/python tools/bench_client.py
	$(BIN)/python tools/bench_open.py

wheels: ## _build/wheels: everything of the light install, for a room without network (make PYTHON=... for its Python)
	$(PYTHON) tools/build_wheels.py

lab: install-light ## open JupyterLab on the notebooks; an engine that is installed stays, none is added (make install does)
	$(BIN)/jupyter lab notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

install: install-light ## .venv with vLLM: the CUDA build where an NVIDIA GPU is visible, else the CPU build
	@$(BIN)/python tools/install_engine.py --engine $(ENGINE)

install-light: .venv/installed ## .venv without vLLM

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and f"kvlab needs Python 3.11 or newer; this is {v[0]}.{v[1]}. Next: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "Next: install the venv module (Debian: apt-get install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

clean: ## remove what is built; measurements and .venv stay
	rm -rf _build
