# `make demo` and `make test` are all that a new reader needs; both set up what they lack.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := smollm2-135m
TORCH := torch==2.13.0
LARGEST := kubernetes-validate|llvmlite|playwright|ray|scipy|transformers|triton|xllamacpp
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile

# A default that an n-gram drafter has something to do with: the answer repeats the question's words.
PROMPT ?= Repeat this passage word for word: The keeper climbed the stairs of the lighthouse, lit the lamp, and \
wrote the hour in the book. The keeper climbed down the stairs of the lighthouse, closed the book, and went to sleep.
DEMO_FLAGS ?= --temperature 0 --max-new-tokens 96
BENCH_FLAGS ?= --drafter ngram --kind copy,code-edit

# Where it is set, every process of the tests and the benchmarks compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup pull demo test test-full check format bench attack chaos fuzz soak compat image-check picture page page-pictures stubs protos dist clean

setup: $(STAMP)

$(STAMP): pyproject.toml drafts/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# pip unpacks on one core: the largest packages come on another one. What is not for this machine is left out.
	{ $(PIP) --no-deps $$(grep -E '^($(LARGEST))==' constraints.txt) || true; } & $(PIP) $(TORCH); code=$$?; wait; exit $$code
	$(PIP) -c constraints.txt -e '.[engine,grammar,http,otel,ray,bench,dev]' -e ./drafts
	@# By all cores, where pip has one, but for what is mostly never loaded; packages have templates that are no Python.
	$(BIN)/python -m compileall -qq -j 0 -x 'packages/(transformers/models|anthropic|openai|ray)/|/tests?/|/testing/' $(VENV)/lib paceline* coordinator draft_service target_service || true
	$(BIN)/python -m tools.kubectl
	@touch $(STAMP)

pull: setup
	@$(BIN)/paceline pull $(MODEL)

demo: pull
	@printf 'prompt: %s\n\n' "$$DEMO_PROMPT"
	@$(BIN)/paceline generate --local --model $(MODEL) --compare $(DEMO_FLAGS) --chat "$$DEMO_PROMPT"

demo: export DEMO_PROMPT = $(value PROMPT)

# Tests wait for a third of their time: a worker more than the two cores that they are tried on, and files in the order
# of tests/conftest.py.
# A test that no signal ends, since it hangs in C, ends its process with the stacks of all threads.
test: pull
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m 'not full' --durations=40 \
		-o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true

test-full: pull
	$(BIN)/python -m tools.full_report

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint
	$(BIN)/python -m tools.check_stubs
	$(BIN)/python -m tools.check_citations
	$(BIN)/python -m tools.structure --check
	$(BIN)/python -m tools.configuration --check
	$(BIN)/python -m tools.metrics --check
	$(BIN)/python -m tools.dashboard --check
	$(BIN)/lint-imports
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: pull
	$(BIN)/paceline bench speed $(MODEL) $(BENCH_FLAGS)

attack: setup
	$(BIN)/python -m tests.attacks

# 1166 faults under load with a report; about 45 minutes on two cores, and a C compiler. SEED=2: others.
SEED ?= 1
chaos: setup
	$(BIN)/python -m tests.chaos --seed $(SEED) --faults 1000 --out docs/reports
	$(BIN)/python -m tests.chaos --seed $(SEED) --shape secured --faults 80 --out docs/reports
	$(BIN)/python -m tests.chaos --seed $(SEED) --shape named --faults 60 --out docs/reports
	$(BIN)/python -m tests.chaos --seed $(SEED) --shape ranked --faults 26 --out docs/reports

# Random faults under load, with a report; `MINUTES=4`: for so long instead of an hour.
soak: setup
	$(BIN)/python -m tests.chaos --soak --seed $(SEED) --faults 100000 \
		--seconds $$((60 * $(or $(MINUTES),60))) --out docs/reports

# 100,000 cases, then docs/reports/fuzz-DATE.md; ten minutes on two cores. `SURFACES="codec http"`: these alone.
fuzz: setup
	rm -rf build/fuzz
	$(BIN)/python -m tests.fuzz $(SURFACES)
	$(BIN)/python -m tests.fuzz.report

# Other people's clients and harnesses, in environments of their own in .compat; 20 minutes and 7 GB.
# `HARNESSES=k6`: one of them.
compat: pull
	$(BIN)/python -m tests.compat $(HARNESSES)

# Root, debootstrap and some minutes; deploy/docker/check.sh says what else.
image-check:
	deploy/docker/check.sh

picture: pull
	$(BIN)/python -m tests.docs.stream_picture

# Both need chromium, Debian's for one.
page: setup
	$(BIN)/python -m pytest -q tests/gateway/test_page.py tests/gateway/test_page_in_browser.py

page-pictures: pull
	$(BIN)/python -m tests.docs.page_pictures

stubs: setup
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. protos/paceline/v1/*.proto

# For other languages (docs/clients.md); needs no Python.
protos:
	mkdir -p dist
	tar -czf dist/paceline-protos-$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml).tar.gz LICENSE buf.yaml protos

# What a release uploads: both distributions, source and wheel.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist drafts

clean:
	rm -rf $(VENV) build dist *.egg-info drafts/build drafts/*.egg-info
