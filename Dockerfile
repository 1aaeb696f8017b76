# The package from its wheel, without the sources. The default command trains the embedded model:
#   docker build -t solrl . && docker run --rm --shm-size 1g -v "$PWD/outputs:/work/outputs" solrl
# With GPUs, options, and the caches of the hub:
#   docker run --rm --gpus all --ipc host -v "$PWD/outputs:/work/outputs" -v ~/.cache/huggingface:/root/.cache/huggingface \
#     -e HF_TOKEN solrl model=flux1 reward=pickscore
# With Transformer Engine, for NVFP4 on Blackwell; it compiles for minutes:
#   docker build --target nvfp4 -t solrl:nvfp4 .
FROM python:3.12-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS plain
# The compiler is for torch.compile. A first process ignores signals before it handles them, so tini is that.
RUN apt-get update && apt-get install -y --no-install-recommends g++ tini && rm -rf /var/lib/apt/lists/*
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
WORKDIR /work
ENTRYPOINT ["tini", "--", "solrl"]

FROM plain AS nvfp4
# Of CUDA torch's packages have the other headers and libraries; these are of the same version.
RUN pip install --no-cache-dir setuptools wheel ninja "cuda-toolkit[crt,curand]"
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-build-isolation "$(echo /wheels/*.whl)[nvfp4]"

FROM plain
