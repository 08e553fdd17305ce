# Everything a person types here. Only Python 3.11 or newer must be there; the rest is installed from the lock files.

PYTHON ?= python3
BIN := .venv/bin
BOOT := $(PYTHON) sardeenz_site/bootstrap.py
PYTEST := $(BIN)/python -m pytest
# What was compiled once is kept: the suite starts hundreds of processes, and rewrites its own assertions.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: openapi help run run-control run-host install dev test test-fast test-postgres test-slow test-engine test-faults bench lint format lock clean

help:            ## these lines
	@grep -hE '^[a-z-]+: *.*##' $(MAKEFILE_LIST) | sed -E 's/: *[^#]*## */\t/' | expand -t 16

run:             ## everything on this machine, in the foreground (PORT, ROUTER_PORT, HOST, DATABASE_URL, REDIS_URL, .env)
	@$(BOOT) run

run-control:     ## pages, router, control worker and beat, without this machine's GPUs
	@$(BOOT) run --role control

run-host:        ## only this machine's GPUs: host worker and sampler (needs DATABASE_URL and REDIS_URL)
	@$(BOOT) run --role host

install:         ## the environment and the front-end files, without starting anything
	@$(BOOT) install

dev:             ## the environment with everything for tests and linters
	@$(BOOT) dev

test: dev        ## the whole suite: SQLite, then what touches the database again on PostgreSQL, then whole stacks
	$(MAKE) --no-print-directory test-fast
	$(MAKE) --no-print-directory test-postgres
	$(MAKE) --no-print-directory test-slow

test-fast: dev
	$(PYTEST) -q -n 2 --dist loadgroup -m "not slow and not browser and not engine and not gpu and not bench"

test-postgres: dev
	SARDEENZ_TEST_DB=postgres $(PYTEST) -q -n 2 --dist loadgroup -m "not slow and not browser and not engine and not gpu and not bench"

test-slow: dev
	$(PYTEST) -q -n 2 --dist loadfile -m "(slow or browser) and not engine and not gpu and not bench"

test-engine: dev ## the contract tests against a real vLLM (CPU build) and against the simulator
	bash tests/contract/run.sh

test-faults: dev ## random acts, kills and losses under a whole stack (SEED, STEPS or KILLS, DB, CAST), then fixed stories
	$(BIN)/python -m tests.faults $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) $(if $(KILLS),--kills $(KILLS)) \
	$(if $(BURST),--burst $(BURST)) $(if $(DB),--database $(DB)) $(if $(CAST),--cast $(CAST))
	$(if $(CAST),,$(PYTEST) -q -n 0 -m "faults and not engine" --deselect tests/faults/test_random_faults.py)

bench: dev       ## measurements; README says what they mean
	$(BIN)/python -m tests.bench.stack_cost
	$(BIN)/python -m tests.bench.sampler_cost
	$(BIN)/python -m tests.bench.cancel
	$(BIN)/python -m tests.bench

lint: dev        ## ruff, mypy, import rules, templates, Django's own checks, missing migrations
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/djlint templates --check --quiet
	$(BIN)/djlint templates --lint --quiet
	SARDEENZ_ENV_FILE=/dev/null $(BIN)/python manage.py check --settings sardeenz_site.settings.test
	SARDEENZ_ENV_FILE=/dev/null $(BIN)/python manage.py makemigrations --check --dry-run --settings sardeenz_site.settings.test

format: dev      ## what ruff and djlint would have
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/djlint templates --reformat --quiet || true

UV := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-header --no-annotate
openapi: dev     ## write the served OpenAPI schema into models_app/api/openapi.json
	$(BIN)/python manage.py export_openapi

lock: dev        ## newest versions that pyproject.toml and package.json allow; no addresses
	$(UV) --upgrade pyproject.toml -o requirements.lock
	$(UV) --upgrade pyproject.toml --extra dev -c requirements.lock -o requirements-dev.lock
	$(UV) --upgrade --group node -o requirements-node.lock
	npm install --package-lock-only
	$(BIN)/python -c "import json; f = 'package-lock.json'; d = json.load(open(f)); \
	[p.pop('funding', None) for p in d['packages'].values()]; open(f, 'w').write(json.dumps(d, indent=2) + '\n')"

clean:           ## what was installed or built here; SARDEENZ_HOME (var/) stays
	rm -rf .venv node_modules static/vendor .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
