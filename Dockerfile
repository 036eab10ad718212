# The image that serves .mar files. `deployer build MAR... -o build/container` writes the context for it: this file,
# requirements.txt, wheels/, source/, models/, entrypoint.sh, healthcheck.py and slim.py; this file alone builds nothing.
#
#   docker build -t digits:1.0 build/container           # podman build and buildah build take the same words
#   docker run --rm --name digits --init --read-only --tmpfs /state:uid=10001,mode=0700,exec \
#       --cap-drop ALL --security-opt no-new-privileges -p 127.0.0.1:8080:8080 digits:1.0
#   docker exec digits cat /state/token                  # what every request must carry
#
# No compiler and no pip; the server is not root; requests are taken on all addresses of the container, with the token;
# management and metrics stay on its loopback. The pins of requirements.txt were read under the Python version that
# BASE_IMAGE names. Compiled (aoti) models need a glibc in it no older than that of the machine that exported them.
# For CUDA models (`docker run --gpus all`) the base stays the same: CUDA's libraries come with the wheels, the driver
# with the host. Build arguments: PIP_INDEX_URL and PIP_EXTRA_INDEX_URL name other indexes than PyPI; no passwords in
# them, builders keep them.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS install
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY requirements.txt slim.py /build/
COPY wheels/ /build/wheels/
RUN python -m venv --without-pip /opt/venv \
    && python -m pip --python /opt/venv/bin/python install --no-cache-dir --disable-pip-version-check \
        --no-deps --only-binary :all: -r /build/requirements.txt
COPY source/ /build/source/
RUN packages="$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && python /build/slim.py "$packages" \
    && cp -r /build/source/. "$packages/" \
    && /opt/venv/bin/python -c "import deployer.cli.serve, deployer.predictor, deployer.serve"

FROM ${BASE_IMAGE}
# The pip of the base image goes too, with the copy of it that `venv` installs from.
RUN python -c "import importlib.util as util, os, shutil; [shutil.rmtree(os.path.dirname(found.origin)) \
        for found in map(util.find_spec, ('pip', 'ensurepip')) if found]" \
    && rm -rf /usr/share/python-wheels /usr/bin/pip* /usr/local/bin/pip*
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /state --shell /usr/sbin/nologin deployer \
    && install -d -o deployer -g deployer -m 0700 /state
COPY --from=install /opt/venv /opt/venv
COPY entrypoint.sh healthcheck.py /opt/deployer/
COPY models/ /models/
# NVIDIA's container runtime shows the image these GPUs: none, or what `deployer build` wrote here for CUDA models.
ARG GPUS=void
ENV NVIDIA_VISIBLE_DEVICES=${GPUS} \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/state \
    TMPDIR=/state
WORKDIR /state
USER 10001:10001
EXPOSE 8080
# As Ctrl-C: Python heeds it from its first moment, as process 1 too.
STOPSIGNAL SIGINT
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "/opt/deployer/healthcheck.py", "/state"]
ENTRYPOINT ["/bin/sh", "/opt/deployer/entrypoint.sh"]
