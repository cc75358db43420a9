# make test, make check, make bench: each prepares .venv by itself. make demo takes .venv, or prepares the smaller .demo.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := .demo
READERS := .readers
MODELS := .models
READER_PYTHON ?= python3.11
# uv installs in a third of pip's time; it reads nothing of pip's settings
PIP_SETTING = $$($(BIN)/pip config get global.$(1) 2>/dev/null)
UV = UV_FIND_LINKS="$${UV_FIND_LINKS-$${PIP_FIND_LINKS-$(call PIP_SETTING,find-links)}}" UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX-$${PIP_INDEX_URL-$(call PIP_SETTING,index-url)}}" $(BIN)/uv --quiet
PEERS := .peers
PEER_PYTHON ?= python3.11
# without .pyc files each of the several hundred processes of a test run compiles what it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help boards install web demo test check audit bench bench-steps bench-peers bench-task bench-programs bench-scale bench-fleet brokers soak kills architectures combinations hostile asynchronous codecs adapters models mutants fuzz fuzz-http reader-environments readers runtimes runtime-environments constraints bench-serve roads reference site clean
help:            ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*##/	/' | expand -t 12

install: $(STAMP) ## prepare .venv with everything

$(STAMP): pyproject.toml constraints.txt
	@echo "installing what the tests and the tools need into $(VENV)"
	@$(PYTHON) .ci/install.py $(VENV) -e '.[dev]'
	@touch $@

$(DEMO)/.installed: pyproject.toml constraints.txt
	@echo "installing what the demo needs into $(DEMO)"
	@$(PYTHON) .ci/install.py $(DEMO) -e '.[emulator]'
	@touch $@

constraints: $(STAMP) ## write constraints.txt anew: one resolution of everything for Python 3.10 to 3.14, pins kept where they can be
	$(BIN)/uv pip compile --quiet --config-file tests/runtimes/uv.toml --universal --python-version 3.10 --extra dev --no-annotate --custom-compile-command 'make constraints' pyproject.toml -o constraints.txt

web: $(STAMP)    ## the phone page's third-party files into .web, once (33 MB from npm's registry)
	$(BIN)/fedcenters-coordinator web-files --out .web

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO)/.installed) ## twelve emulated devices, three centers, exported and handed to new devices
	$(if $(wildcard $(STAMP)),$(BIN),$(DEMO)/bin)/fedcenters-emulator demo

test: $(STAMP)   ## the tests
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not board"

check: $(STAMP)  ## lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# --strict: without it a package that the service does not know is passed over, and the exit status is 0
audit: $(STAMP)  ## known vulnerabilities of the pinned packages; asks pypi.org, and fails where a package cannot be looked up
	$(UV) tool run pip-audit@2.10.1 --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off

bench: bench-steps bench-peers ## all figures of BENCHMARKS.md; about a quarter of an hour
	$(BIN)/python -m tests.benches

bench-steps: $(STAMP) ## a training step of the main models, with memory
	$(BIN)/python -m tests.benches.programs --models digits-mlp wecfl-cnn gn-cnn --memory

bench-peers: $(PEERS)/pfl/.installed $(PEERS)/fedjax/.installed $(PEERS)/flower/.installed ## what `make bench` races against, each in its own environment

# one that cannot be installed leaves its rows unmeasured, which the bench says
$(PEERS)/%/.installed: tests/benches/peers/%.txt
	@mkdir -p $(@D)
	@{ $(PEER_PYTHON) -m venv $(@D) && $(@D)/bin/pip install --quiet --disable-pip-version-check -r $< && touch $@; } || echo "$* cannot be installed: its benches will be unmeasured" >&2

bench-task: $(STAMP) $(PEERS)/flower/.installed $(PEERS)/fluke/.installed ## the same task in ours, Flower and fluke: lines, seconds, memory
	$(BIN)/python -m tests.benches.same_task

bench-programs: $(STAMP) ## a training step of every model on every engine against torch
	$(BIN)/python -m tests.benches.programs --json bench-programs.json

bench-scale: $(STAMP) ## all figures of BENCHMARKS.md about size: 20,000 connections, a round of 1,000 devices, replies per second, simulated fleets up to a million with their picture, the bundle, Ray; some hours
	$(BIN)/python -m tests.benches.fleet crowd --devices 2000
	$(BIN)/python -m tests.benches.fleet crowd --devices 5000
	$(BIN)/python -m tests.benches.fleet crowd --devices 19900
	$(BIN)/python -m tests.benches.aggregation
	$(BIN)/python -m tests.benches.aggregation --devices 100 200 --sizes 6.6M --codec i8 --methods fedavg fesem median --only now
	$(BIN)/python -m tests.benches.aggregation --devices 1000 --sizes 6.6M --codec i8 --methods fedavg --only now
	$(BIN)/python -m tests.benches.replies
	$(BIN)/python -m tests.benches.million
	$(BIN)/python -m tests.benches.million devices --data fashion --devices 1000000
	$(BIN)/python -m tests.benches.million devices --data writers --devices 1000000
	$(BIN)/python -m tests.benches.million --picture docs/million.svg
	$(BIN)/python -m tests.benches.bundle
	$(BIN)/python -m tests.benches.cluster

bench-fleet: $(STAMP) ## 1,000 devices that upload 1.15 MB each, then 5,000 small ones, over mosquitto; some minutes on an idle machine
	$(BIN)/python -m tests.benches.fleet

brokers: $(STAMP) ## what the protocol needs of a broker, over each that is installed: mosquitto, embedded, and by hand nats-server, rabbitmq-server
	$(BIN)/pytest -rs tests/conformance/test_brokers.py tests/conformance/test_guarded_brokers.py

soak: $(STAMP)   ## two hours of 300 devices, a fifth of them cut off at any time: memory of every process, and whether anything is lost; needs mosquitto
	$(BIN)/python -m tests.benches.soak

kills: $(STAMP)  ## 250 SIGKILLs in the middle of rounds with f32, then with i8: the states are those of an undisturbed run; needs mosquitto, about an hour
	$(BIN)/python -m tests.faults.kills

architectures: $(STAMP) ## five hundred random architectures: each matches torch or is refused by name
	$(BIN)/python -m tests.figures.architectures

combinations: $(STAMP) ## six hundred random combinations of method, settings and options of a run: each is refused by name before its first round, or keeps every promise of tests/support/run_promises.py; some minutes of CPU. Then fifty over a mosquitto with real clients (real_promises.py)
	$(BIN)/python -m tests.figures.combinations
	$(BIN)/python -m tests.figures.combinations --real --count 50

mutants: $(STAMP) ## small faults in the code, drawn by a seed: which does no test find; hours, and the same command again goes on; or PLACES="coordinator/rounds" EACH=3 SEED="2 3"
	$(BIN)/python -m tests.mutants $(PLACES) $(if $(EACH),--each $(EACH)) $(if $(SEED),--seed $(SEED))

hostile: $(STAMP) ## honest devices' accuracy while others attack, with every reduce; about ten minutes of CPU
	$(BIN)/python -m tests.figures.attacks

asynchronous: $(STAMP) ## time and bytes to an accuracy without rounds, beside rounds and over-selection; needs FEDCENTERS_DATA, about a quarter of an hour of CPU
	$(BIN)/python -m tests.figures.asynchronous

codecs: $(STAMP) ## accuracy and bytes of each codec; needs FEDCENTERS_DATA
	$(BIN)/python -m tests.figures.codecs

models: $(MODELS)/.installed ## models of a dozen libraries, each compiled and stepped beside torch, into docs/models.md; about an hour
	$(MODELS)/bin/pytest -q tests/zoo tests/docs/test_adapters_page.py
	$(MODELS)/bin/python -m tests.zoo --write docs/models.md

$(MODELS)/.installed: $(STAMP) tests/zoo/requirements.txt tests/zoo/requirements-alone.txt
	@$(PYTHON) .ci/install.py $(MODELS) -e '.[dev]'
	@$(UV) pip install -c constraints.txt --python $(MODELS)/bin/python -r tests/zoo/requirements.txt
	@$(UV) pip install --no-deps --python $(MODELS)/bin/python -r tests/zoo/requirements-alone.txt
	@rm -f $(MODELS)/lib/python*/site-packages/torchaudio/lib/*.so  # for CUDA; its models need none of them
	@touch $@

adapters: $(MODELS)/.installed ## LoRA on a frozen base beside whole models: accuracy and bytes, three seeds; needs FEDCENTERS_DATA, about ten minutes of CPU
	$(MODELS)/bin/python -m tests.figures.adapters

fuzz: $(STAMP)   ## ten million damaged inputs to every decoder; about ten minutes of CPU
	$(BIN)/python -m tests.attacks.fuzz_decoders --cases 10000000

fuzz-http: $(STAMP) ## ten minutes of requests from OpenAPI documents to each of the three HTTP servers
	$(BIN)/python -m tests.attacks.fuzz_http --seconds 600

bench-serve: $(STAMP) ## requests per second of fedcenters-export serve; needs wrk (apt install wrk), about a minute and a half
	$(BIN)/python -m tests.benches.serve

roads: $(STAMP)  ## the README's commands for a server and two boards, over mosquitto with certificates
	$(BIN)/pytest -m slow tests/docs/test_roads.py

reference: $(STAMP) ## pages of all modules from their docstrings, in build/reference
	$(BIN)/python -m tests.docs.reference build/reference

reader-environments: $(READERS)/tflite/.installed $(READERS)/tensorflow/.installed $(READERS)/onnxruntime/.installed $(READERS)/flwr-datasets/.installed ## what `make readers` runs our files with

site: $(STAMP)   ## the documentation as a site, in build/site: docs/, the notebooks, and the docstrings of `fedcenters`
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site -b html . build/site
	@echo "build/site/index.html"

readers: $(STAMP) reader-environments ## other runtimes run our files, and other libraries' data and partitions become fleets
	$(BIN)/python -m tests.readers.write $(READERS)/files
	$(READERS)/tflite/bin/python tests/readers/read.py tflite_runtime.interpreter $(READERS)/files
	$(READERS)/tensorflow/bin/python tests/readers/read.py tensorflow.lite.python.interpreter $(READERS)/files
	$(READERS)/onnxruntime/bin/python tests/readers/read.py onnxruntime $(READERS)/files
	$(READERS)/flwr-datasets/bin/python -m pytest -q -p no:cacheprovider tests/emulator/api/data/test_partitions.py tests/emulator/api/data/test_hugging_face.py

# tflite-runtime 2.14 is its last release: numpy 1, Python 3.11 at most
$(READERS)/tflite/.installed: PACKAGES := 'tflite-runtime==2.14.0' 'numpy<2'
$(READERS)/tensorflow/.installed: PACKAGES := 'tensorflow-cpu==2.21.0'
$(READERS)/onnxruntime/.installed: PACKAGES := 'onnxruntime==1.19.2'
$(READERS)/flwr-datasets/.installed: PACKAGES := 'flwr-datasets==0.6.1' 'datasets==4.8.5' cryptography hypothesis numpy paho-mqtt pillow pytest pytest-timeout rich safetensors scikit-learn scipy
$(READERS)/%/.installed: $(STAMP)
	@$(UV) venv --clear --python $(READER_PYTHON) $(@D)
	@$(UV) pip install --python $(@D)/bin/python $(PACKAGES)
	@touch $@

runtimes: $(STAMP) ## every Python and runtime that we name, in environments of their own; needs mosquitto, 25 GB and half an hour; ROWS="3.10-newest" runs some
	$(BIN)/python -m tests.runtimes $(if $(ROWS),--only $(ROWS))

runtime-environments: $(STAMP) ## what `make runtimes` runs the client with; ROWS as there
	$(BIN)/python -m tests.runtimes --install $(if $(ROWS),--only $(ROWS))

boards: $(STAMP) ## flashed arm64 systems under qemu in a real federation, and a flashed image that boots; needs root, debootstrap, mosquitto, mmdebstrap, qemu-system-arm; about half an hour
	$(BIN)/pytest -q --show-capture=no -m "board or slow" tests/boards
	$(BIN)/python -m tests.boards.sizes

clean:           ## remove .venv and caches
	rm -rf $(VENV) $(DEMO) $(READERS) $(MODELS) $(PEERS) .runtimes .web build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
