# Every target makes its own environment in .venv from constraints.txt and infra/hashes.txt; nothing else is needed but Python 3.11.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python infra/install.py
SOURCES := $(shell find runtime snapshot handlers templates -type f -not -name '*.pyc') $(wildcard *.py) pyproject.toml
EXTRAS := test

.PHONY: help demo demo-gateways test check architectures versions hashes audit lint bench bench-snapshot bench-gpu bench-jobs bench-policy bench-starts bench-fleet bench-warm check-api check-infra bench-llm bench-containers bench-compare soak attack mutants clean
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

.venv/uv: infra/hashes.txt
	@echo "Making an environment in .venv, and installing uv."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@sed -n '/^uv==/,/[^\\]$$/p' infra/hashes.txt | $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r /dev/stdin
	@touch $@

# This installs the package, too, so its wheel is new. Without --reinstall-package, uv may use the wheel of older sources.
.venv/installed-%: .venv/uv constraints.txt infra/hashes.txt pyproject.toml
	@rm -rf build/lib build/bdist.*
	$(INSTALL) -c constraints.txt setuptools
	$(INSTALL) --no-build-isolation -c constraints.txt --reinstall-package pilotflame '.[$*]'
	@touch $@ .venv/wheel

# The package is installed as a wheel, as users have it: an editable install adds 11-18 ms to every interpreter start.
.venv/wheel: .venv/installed-$(EXTRAS) $(SOURCES)
	@rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	@touch $@

demo: EXTRAS := demo
# Python compiles what the demo imports when it is first imported. To compile all of torch takes longer than to install it.
demo: export UV_COMPILE_BYTECODE := 0
demo: .venv/installed-demo ## Cold starts of a real model: p50, p99, phases, memory, beside a fresh process
	@$(MAKE) --no-print-directory EXTRAS=demo .venv/wheel
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pilotflame demo $(DEMO_ARGS)

demo-gateways: .venv/wheel ## Three gateways on one PostgreSQL: a gateway and PostgreSQL are killed, and no job is lost
	$(BIN)/python infra/demo_gateways.py

test: .venv/wheel ## All tests, on three processes: they wait for a third of their time
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: .venv/installed-test ## One room: lint, types, facts of the tree, its tests, in about a minute: make check ROOM=runtime/front/api
	$(BIN)/python infra/check_room.py $(ROOM) $(CHECK_ARGS)

architectures: .venv/wheel ## The tokens of 32 architectures of language models beside those of `generate`, with three versions of transformers
	$(BIN)/python infra/architectures.py

versions: .venv/wheel ## The oldest and the newest libraries that pyproject.toml allows: install, and run their tests
	$(BIN)/python infra/versions.py $(VERSIONS_ARGS)

# torch has no hashes: its files are others on PyPI and on each of PyTorch's indexes. Without --upgrade, uv keeps the old hashes.
hashes: .venv/uv ## infra/hashes.txt: the hashes of the versions in constraints.txt, from the package index
	grep -v '^torch==' constraints.txt | $(BIN)/uv pip compile --quiet --universal --no-deps --upgrade --generate-hashes \
	  --no-annotate --custom-compile-command 'make hashes' --output-file infra/hashes.txt -

audit: .venv/installed-test ## Known vulnerabilities of the versions in constraints.txt, where the data can be reached
	$(INSTALL) -c constraints.txt pip-audit
	$(BIN)/python infra/audit.py

lint: .venv/wheel ## ruff, import-linter and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy -p pilotflame
	MYPYPATH=infra:infra/bench:tests $(BIN)/mypy --explicit-package-bases infra/bench infra/*.py

bench: .venv/installed-bench ## Cold start, a fourth worker's memory, and a warm call, beside a fresh process, an echo and LitServe
	@$(MAKE) --no-print-directory EXTRAS=bench .venv/wheel
	$(BIN)/python infra/bench/bench.py

NGINX := PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null
APT := $(if $(filter 0,$(shell id -u)),,sudo )env DEBIAN_FRONTEND=noninteractive apt-get

bench-snapshot: .venv/installed-bench ## Loading weights, in plain and TLS, beside raw sockets and client libraries
	@$(NGINX) || echo "nginx, the range server of this benchmark, is missing: installing nginx-light with apt"
	@$(NGINX) || { $(APT) update -qq && $(APT) install -qq --yes --no-install-recommends nginx-light; }
	@$(MAKE) --no-print-directory EXTRAS=bench .venv/wheel
	$(BIN)/python infra/bench/snapshot_bench.py $(BENCH_ARGS)

bench-gpu: export UV_TORCH_BACKEND := $(or $(UV_TORCH_BACKEND),auto)
bench-gpu: .venv/installed-bench ## Weights to a GPU, beside raw copies and a loader; simulated where there is none
	@$(MAKE) --no-print-directory EXTRAS=bench .venv/wheel
	$(BIN)/python infra/bench/gpu.py $(BENCH_ARGS)

bench-jobs: .venv/installed-bench ## Durable jobs: submits, status among a million, the store's size
	@$(MAKE) --no-print-directory EXTRAS=bench .venv/wheel
	$(BIN)/python infra/bench/jobs_bench.py $(BENCH_ARGS)

bench-policy: .venv/wheel ## The keep-alive policy, beside fixed timeouts and the optimum, on traces
	$(BIN)/python infra/bench/policy_bench.py $(BENCH_ARGS)

bench-starts: .venv/wheel ## 500 workers of a small function at once, from zero: seconds, and memory of each
	$(BIN)/python infra/bench/starts.py $(BENCH_ARGS)

bench-fleet: .venv/wheel ## A function's cost among 20 and 400: starts, calls, deploys, the gateway's memory, `list`
	$(BIN)/python infra/bench/fleet.py $(BENCH_ARGS)

bench-warm: .venv/installed-bench ## The warm path beside LitServe; overload, tenants, streams
	@$(MAKE) --no-print-directory EXTRAS=bench .venv/wheel
	$(BIN)/python infra/bench/warm_bench.py $(BENCH_ARGS)

check-api: .venv/wheel ## schemathesis over /openapi.json: 2,000 requests and more, each answer as described
	$(BIN)/python infra/bench/schema.py --examples 30

check-infra: .venv/wheel ## The manifests in infra/: misspelt fields, missing files, queries that are none
	$(BIN)/python infra/check.py

bench-llm: .venv/wheel ## Language models: the engine beside a bare loop and generate, and the first token from zero
	$(BIN)/python infra/bench/llm_bench.py $(BENCH_ARGS)

bench-containers: .venv/wheel ## Containers: cold starts, memory that they share, and neighbours; needs podman and runc
	$(BIN)/python infra/bench/containers_bench.py $(BENCH_ARGS)

bench-compare: .venv/wheel ## CPU time of a hello, of a job and of a cold start beside another commit: make bench-compare BENCH_ARGS='--against HEAD~1'
	$(BIN)/python infra/bench/path_cost.py $(BENCH_ARGS)

soak: .venv/wheel ## What stays behind or gets lost, in hours: make soak PART=activations, containers, gateway, histories, jobs, kafka, revisions or rolling
	PYTHONPATH=tests $(BIN)/python infra/bench/soak_$(or $(PART),activations).py $(BENCH_ARGS)

attack: .venv/wheel ## Hostile functions and callers: what they get, and what other tenants notice; needs podman and runc
	$(BIN)/python infra/bench/attack.py $(ATTACK_ARGS)

mutants: .venv/installed-mutants ## 140 changes of 28 modules drawn by a seed: how many the mirrored tests catch, and which not
	@$(MAKE) --no-print-directory EXTRAS=mutants .venv/wheel
	$(BIN)/python infra/mutants.py $(MUTANTS_ARGS)

clean: ## Remove the environment and what was built
	rm -rf .venv build
