# The image `vllm-cuda`: make images, or
#   docker build -f deploy/docker/vllm-cuda.Dockerfile -t outrider:0.1.1-vllm-cuda .
# With Ray, as `ray-vllm-cuda` for KubeRay and for targets over several nodes: --build-arg EXTRAS=ray
# vLLM's own image has matching versions of torch, CUDA and vLLM. What it lacks is installed without hashes, because that depends
# on the image. Give BASE with its digest (...@sha256:...) to build on exactly that image. `deploy/docker/try_image.sh` builds on Debian instead.
ARG BASE=vllm/vllm-openai:v0.32.0

FROM ${BASE} AS build
ARG PIP_INDEX_URL=
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY protos protos
COPY cluster cluster
COPY services services
# The checkout's, which `outrider --version` shows.
ARG COMMIT=
RUN [ -n "${PIP_INDEX_URL}" ] || unset PIP_INDEX_URL; \
    OUTRIDER_RELEASE=1 OUTRIDER_COMMIT="${COMMIT}" python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG PIP_INDEX_URL=
ARG EXTRAS=
USER root
COPY --from=build /wheels /wheels
# What vLLM has already stays as it is; a torch of another version would be an error here, not at the first request.
RUN [ -n "${PIP_INDEX_URL}" ] || unset PIP_INDEX_URL; \
    python3 -m pip freeze | grep -iE '^(torch|vllm|triton)==' > /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/*.whl)${EXTRAS:+[${EXTRAS}]}" \
    && rm -r /wheels /tmp/constraints.txt \
    && mkdir -p /models && chown 1000:1000 /models
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/models
USER 1000:1000
WORKDIR /tmp
# Of `outrider serve` and `outrider router`; for a worker set OUTRIDER_HEALTH to its host:port. Kubernetes has its own probes.
HEALTHCHECK --start-period=60s CMD outrider health ${OUTRIDER_HEALTH:-http://127.0.0.1:8000}
ENTRYPOINT ["outrider"]
CMD ["--help"]
