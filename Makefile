# Everything runs in .venv, made from the exact versions in requirements.lock. Any Python from 3.11:
# make PYTHON=python3.12 test
PYTHON ?= python3
RUN = .venv/bin/python
DOCS = .venv/docs/bin/python
EXCHANGE = $(patsubst %,tests/test_%.py,hf modernbert modernbert_export spm exchange tf1 weight_files deberta encoder calls onnx)
# Some images forbid bytecode; then each process compiles the tests and the package again.
export PYTHONDONTWRITEBYTECODE =
# What tests compile is kept, for each other and for the next time.
test test-core test-long test-hf test-faults test-nightly test-slurm test-versions test-buckets test-trackers test-notebook \
mutants: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.pytest_cache/compiled

.PHONY: quickstart test test-core lint hf-packages test-versions test-long test-faults test-nightly mutants test-slurm
.PHONY: test-hf test-tpu test-gpu-compile test-engines test-buckets test-trackers test-notebook test-docs test-report
.PHONY: speedrun speedrun-smoke gpu gpu-smoke docs dist lock clean

quickstart: .venv/ready  ## corpus, vocabulary, shards, training, samples, report: five minutes on two cores
	.venv/bin/electra-jax quickstart

test: lint  ## lint, the examples in docstrings and the default tests
	$(RUN) -m pytest -o faulthandler_timeout=240

test-core: lint  ## lint and the quick tests of the pure layer: a minute
	$(RUN) -m pytest -m "core and not long and not slow" tests

lint: .venv/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

test-long: .venv/ready  ## what the default tests leave out because it compiles for minutes (PART=0/3: a third); test-hf runs its own
	$(RUN) -m pytest -m "long and not nightly" $(PART:%=--part=%) $(EXCHANGE:%=--ignore=%)

test-faults: .venv/ready  ## kill, starve and damage real runs, and compare what they end with, bit for bit
	$(RUN) -m pytest -m "faults and not nightly" $(PART:%=--part=%) tests/faults

test-nightly: .venv/ready  ## what repeats a claim on more inputs: more kills, objectives, generators
	$(RUN) -m pytest -m nightly
	$(RUN) tests/notebook.py --whole

mutants: .venv/ready  ## changes one line at a time and asks whether the tests notice: hours; ARGS=--part=0/4
	$(RUN) tests/mutants.py $(ARGS)

test-slurm: .venv/ready  ## launch/slurm.sbatch on a real SLURM of this machine (apt-get install slurm-wlm munge)
	$(RUN) tests/slurm_resume.py

hf-packages: .venv/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.23.0 \
	  accelerate==1.15.0 sentence-transformers==6.2.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0

test-hf: hf-packages  ## exchange with Hugging Face, against transformers on PyTorch (installs both)
	$(RUN) -m pytest -m "not nightly" $(EXCHANGE)

test-versions: .venv/ready  ## core tests and a training on the oldest and the newest Python and libraries that pyproject.toml allows
	$(RUN) tests/versions.py

test-tpu: .venv/ready  ## preflight with the TPU compiler, installed where only this finds it; needs no TPU
	$(RUN) tests/tpu_compile.py

test-gpu-compile: .venv/ready  ## preflight with the GPU compiler (700 MB), likewise; small on an H200, base on eight
	$(RUN) tests/gpu_compile.py

test-engines: .venv/ready  ## builds of shards on Apache Beam and Ray, installed where only this finds them
	$(RUN) tests/engines.py

test-buckets: .venv/ready  ## text and runs in S3, Google's storage, a web server and a Hub, on loopback (250 MB), through faults
	$(RUN) tests/buckets/run.py $(ARGS)

gpu:  ## checks and measures a machine with a GPU in 40 minutes; PYTHON has JAX for it; if interrupted, it continues
	$(PYTHON) benchmarks/gpu.py $(ARGS)

speedrun:  ## ten minutes of a GPU: shards, training by the clock, exports, tasks; PYTHON has JAX for it
	$(PYTHON) benchmarks/speedrun.py $(ARGS)

speedrun-smoke: .venv/ready  ## the same in miniature, on the CPU and without TensorFlow
	rm -rf runs/speedrun-smoke
	PYTHONPATH=$(CURDIR)/tests/without_tensorflow $(RUN) benchmarks/speedrun.py --smoke

gpu-smoke: .venv/ready  ## the same in miniature, on the CPU and without TensorFlow
	rm -rf runs/gpu-smoke
	PYTHONPATH=$(CURDIR)/tests/without_tensorflow $(RUN) benchmarks/gpu.py --smoke

test-trackers: .venv/ready  ## runs that log to wandb and MLflow, offline, installed where only this finds them
	$(RUN) tests/trackers.py

test-notebook: .venv/ready  ## docs/guides/notebook.ipynb in a kernel, installed where only this finds it
	$(RUN) tests/notebook.py

test-docs: docs  ## the site in a headless Chromium (apt-get install chromium chromium-driver)
	$(RUN) tests/site_browser.py

test-report: .venv/ready  ## a report in a headless Chromium (apt-get install chromium chromium-driver)
	$(RUN) tests/report_browser.py

.venv/ready: requirements.lock pyproject.toml setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile --use-pep517 --require-hashes -r requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

docs: .venv/docs/ready  ## the documentation as a site, with the API: build/site/index.html
	$(DOCS) docs/site.py

# Apart from what trains, and without it.
.venv/docs/ready: .venv/ready pyproject.toml
	$(PYTHON) -m venv .venv/docs
	$(RUN) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  | $(DOCS) -m pip install --quiet --disable-pip-version-check --no-compile -r /dev/stdin
	touch $@

dist: .venv/ready  ## the sdist and the wheel of a release
	rm -rf build dist
	$(RUN) -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"

LOCK = uv pip compile --universal --python-version 3.11 --no-annotate --no-header --generate-hashes --upgrade pyproject.toml
lock:  ## solves the versions anew, for every Python and platform, with the hashes of all files; needs uv
	$(LOCK) --extra dev -o requirements.lock
	$(LOCK) --extra beam -o requirements-beam.lock
	$(LOCK) -c requirements.lock --extra data --extra buckets --extra gpu -o requirements-gpu.lock
	$(LOCK) -c requirements.lock --extra data --extra buckets --extra tpu -o requirements-tpu.lock

clean:  ## removes what runs made; shards, checkpoints and .venv
	rm -rf runs .venv .pytest_cache
