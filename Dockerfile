# One image for workers, gateways, Flower and producers. For NVIDIA docker-compose.yml gives other bases and CMAKE_ARGS.
# It runs on every x86-64 CPU, with the library that suits this CPU best. CMAKE_ARGS="" builds for the CPU of the building machine only.
ARG BUILD_BASE=python:3.11-slim-bookworm
ARG BASE=python:3.11-slim-bookworm

FROM ${BUILD_BASE} AS build
ARG CMAKE_ARGS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
WORKDIR /src
COPY constraints.txt .
# llama.cpp first: it takes minutes and changes seldom. On other processors than x86-64, the variants need a newer compiler.
RUN if [ "$(uname -m)" = x86_64 ]; then \
      variants="-DGGML_BACKEND_DL=on -DGGML_CPU_ALL_VARIANTS=on -DCMAKE_INSTALL_BINDIR=llama_cpp/lib"; \
    fi \
    && export CMAKE_ARGS="${CMAKE_ARGS--DGGML_NATIVE=off $variants}" \
    && /venv/bin/pip install --no-cache-dir -c constraints.txt llama-cpp-python
COPY . .
RUN /venv/bin/pip install --no-cache-dir -c constraints.txt '.[worker,http,files,flower,metrics,otel]'

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 python3 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home cellama && install -d -o cellama -g cellama /home/cellama/.cache
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER cellama
WORKDIR /home/cellama
# Files of the hub and what `cellama tune` found out.
VOLUME /home/cellama/.cache
ENTRYPOINT ["cellama"]
CMD ["worker"]
