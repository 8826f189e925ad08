# Everything a newcomer or CI runs. `make` alone lists it.
.DEFAULT_GOAL := help
.PHONY: help setup hashes tools quickstart test test-real test-long mutants check bench simulate soak monitor prometheus docs chaos setup-gpu gpu-proof
BIN := .venv/bin

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## Make .venv as requirements/ pins it (instant when it is current).
	@scripts/setup.sh

setup-gpu:  ## Make .venv-gpu for NVIDIA GPUs, with TransformerEngine built here (needs driver and CUDA toolkit).
	@scripts/setup-gpu.sh

hashes:  ## Write the hashes of all pinned packages into requirements/, after a change of a version.
	@$(PYTHON) scripts/hashes.py

tools:  ## Get Prometheus and Chromium for the tests, from the PATH or Debian's packages.
	@scripts/tools.sh

quickstart: setup  ## Set up and train a tiny MoE with a calculator tool, on this CPU.
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/calculator/quickstart.sh

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup tools  ## Set up and run the tests (8 minutes on 2 cores after set-up).
	@$(PYTEST) -m "not real and not long" $(TESTS)

test-real: setup tools  ## Test SGLang, Megatron, Ray and processes at depth (11 minutes on 2 cores).
	@$(PYTEST) -m "real and not long" $(TESTS)

test-long: setup tools  ## Run the other tests: more layouts, models and seeds, kills, a cluster, mutants (MINUTES=N ORDER=TEXT).
	@$(PYTEST) -m long $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ORDER),--order $(ORDER)) $(TESTS)

mutants: setup tools  ## Break each promise of CONTRIBUTING.md in one function; a test must notice each (ONLY="NAME NAME").
	@$(BIN)/python -m verification.mutants --jobs 2 $(if $(ONLY),--only $(ONLY))

chaos: setup  ## Inject faults into the real loop (SEED=0 MINUTES=30 ONLY="engine:stuck_payload disk:disk_full").
	@$(BIN)/python -m verification.chaos --seed $(or $(SEED),0) --minutes $(or $(MINUTES),30) $(if $(ONLY),--only $(ONLY))

PYTHON ?= $(BIN)/python

gpu-proof:  ## Run on a GPU what needs one (PYTHON= MINUTES=N NEEDS=trainer,engine JSON=FILE FRESH=1 REHEARSE=1).
	@$(PYTHON) -m tests.gpu $(if $(JSON),--json $(JSON)) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(NEEDS),--needs $(NEEDS)) $(if $(FRESH),--fresh) $(if $(REHEARSE),--rehearse)

check: setup  ## Formatting, lint and types.
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

bench: setup  ## Run the benchmarks, briefly (all but wrong_routing.py and price_of_staleness.py, which train the quickstart's model).
	@set -e; for file in $$(grep -l -e ', quick="' benchmarks/*.py); do \
		echo "== $$file"; $(BIN)/python $$file --quick; done

SEEDS ?= 2000
SEED_START ?= 0

simulate: setup  ## Run SEEDS=2000 seeds of the simulation from SEED_START=0 on; SEEDS=1 prints one in detail.
	@$(BIN)/python -m verification.simulation --seeds $(SEEDS) --start $(SEED_START)

soak: setup  ## Run 200,000 trajectories and every fault 50 times in virtual time; nothing may grow (SHORT=1).
	@$(BIN)/python -m verification.simulation.soak --seed $(or $(SEED),0) $(if $(SHORT),--short)

monitor: runs/.prometheus .tools/grafana.env  ## Start Prometheus and Grafana in Docker, on loopback; see monitoring/README.md.
	@docker compose version >/dev/null 2>&1 || { echo "make monitor: needs Docker with compose. Without it," \
		"\`make prometheus\` starts Prometheus and its alerts, without Grafana" >&2; exit 3; }
	docker compose --env-file .tools/grafana.env -f monitoring/docker-compose.yml up

prometheus: runs/.prometheus  ## Start Prometheus without Docker, on loopback (PORT=9090).
	@scripts/tools.sh prometheus && mkdir -p .tools/prometheus-data
	PATH="$$PATH:$(CURDIR)/.tools/bin" exec prometheus --config.file=monitoring/prometheus.yml \
		--storage.tsdb.path=.tools/prometheus-data --web.listen-address=127.0.0.1:$(or $(PORT),9090)

# Where runs tell Prometheus of themselves; Docker would make it as root.
runs/.prometheus:
	@mkdir -p -m 755 $@

# The password of Grafana's admin, for this user only.
.tools/grafana.env:
	@mkdir -p $(@D) && umask 077 && echo "GRAFANA_PASSWORD=$$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" >$@.new && mv $@.new $@

docs: setup  ## Generate docs/reference/config.md and metrics.md and the Grafana dashboard.
	@$(BIN)/async-rl schema --markdown > docs/reference/config.md.new && mv docs/reference/config.md.new docs/reference/config.md
	@$(BIN)/async-rl schema --metrics > docs/reference/metrics.md.new && mv docs/reference/metrics.md.new docs/reference/metrics.md
	@$(BIN)/python -m monitoring.dashboard && $(BIN)/python -m monitoring.picture
