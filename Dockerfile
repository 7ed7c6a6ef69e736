# The pinned stack for CUDA; docs/machines.md says what has been run of it.
#
#   docker build --tag openrlhf-dbb .
#   docker run --gpus all --shm-size 16g --volume openrlhf-dbb:/runs openrlhf-dbb train --preset tiny
#   docker run --gpus all --shm-size 16g --volume openrlhf-dbb:/runs openrlhf-dbb runs
#
# Ray's object store and NCCL are in /dev/shm, of which a container has 64 MB unless told. /runs is where a command
# starts: databases, checkpoints and models, and what is downloaded. The CUDA version is that of torch in requirements/cuda.lock, whose packages
# bring all of CUDA but the driver; Triton needs gcc and Python.h at run time.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner 1000 --group 1000 /opt/openrlhf_dbb /runs

# The image's user ubuntu.
USER 1000:1000
WORKDIR /opt/openrlhf_dbb
COPY --chown=1000:1000 . .
RUN OPENRLHF_DBB_PLATFORM=cuda PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 bash scripts/setup_env.sh

ENV PATH=/opt/openrlhf_dbb/.venv/bin:$PATH XDG_CACHE_HOME=/runs/.cache
WORKDIR /runs
VOLUME /runs
ENTRYPOINT ["openrlhf-dbb"]
