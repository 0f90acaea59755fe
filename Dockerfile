# The service on a GPU (torch's own CUDA wheels; the host brings the driver and the NVIDIA container runtime)
# or, with TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu, on a CPU. Needs BuildKit, Docker's default builder.

FROM python:3.12.12-slim-bookworm AS base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build

# Dependencies as a list, so that a change of our code leaves the installed layers alone. Settings of .env ask for these
# extras, which are small. Ray is not: add scale for replicas.
FROM base AS requirements
ARG EXTRAS="postgresql shared otel quantization adapters parallel"
COPY pyproject.toml ./
RUN python -c "import os, tomllib; project = tomllib.load(open('pyproject.toml','rb'))['project']; \
    extras = [project['optional-dependencies'][name] for name in os.environ['EXTRAS'].split()]; \
    print(*project['dependencies'], *sum(extras, []), sep='\n')" > requirements.txt

FROM base AS wheel
COPY pyproject.toml LICENSE ./
COPY patches patches
COPY service service
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir dist .

FROM base AS runtime
# A fixed id, so that volumes keep their owner from one image to the next.
RUN groupadd --gid 10001 ropeway \
    && useradd --uid 10001 --gid ropeway --home-dir /cache --no-create-home --shell /usr/sbin/nologin ropeway \
    && install --directory --owner=ropeway --group=ropeway /cache

# Triton compiles the launchers of its kernels. The font draws Chinese, Japanese and Korean names in pictures. Debian has
# one version of a package at a time, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev fonts-wqy-microhei \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX_URL=""
RUN --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip install ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} --constraint constraints.txt torch

RUN --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=bind,from=requirements,source=/build/requirements.txt,target=requirements.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt --requirement requirements.txt

RUN --mount=type=bind,from=wheel,source=/build/dist,target=dist \
    pip install --no-cache-dir --no-deps dist/*.whl

# The server writes only to /cache (a volume: models, and the database of jobs) and /tmp (a tmpfs). The root may be read-only.
ENV HF_HOME=/cache \
    ROPEWAY_DATABASE_URL=sqlite:////cache/ropeway.db \
    MPLCONFIGDIR=/tmp/matplotlib \
    TRITON_CACHE_DIR=/cache/triton \
    ROPEWAY_HOST=0.0.0.0 \
    ROPEWAY_PORT=8000
WORKDIR /cache
VOLUME ["/cache"]
USER 10001:10001
EXPOSE 8000
# No proxy: HTTP_PROXY from the host's Docker configuration would catch 127.0.0.1. The start period allows a download.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import os; from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open(f\"http://127.0.0.1:{os.environ['ROPEWAY_PORT']}/health/ready\", timeout=4)"]
ENTRYPOINT ["ropeway", "serve"]
