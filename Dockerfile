# One image for workers, Flower and producers. GPU: --build-arg CMAKE_ARGS="-DGGML_CUDA=on" with a CUDA base image.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG CMAKE_ARGS=""
ENV CMAKE_ARGS=${CMAKE_ARGS} PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
WORKDIR /src
COPY constraints.txt .
# llama.cpp first: it takes minutes and changes seldom.
RUN /venv/bin/pip install --no-cache-dir -c constraints.txt llama-cpp-python
COPY . .
RUN /venv/bin/pip install --no-cache-dir -c constraints.txt '.[worker,flower]'

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 python3 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home cellama
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER cellama
WORKDIR /home/cellama
ENTRYPOINT ["cellama"]
CMD ["worker"]
