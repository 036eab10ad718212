# The image that serves .mar files. `deployer build MAR... -o build/container` writes the context for it: this file,
# requirements.txt, source/, models/, entrypoint.sh and healthcheck.py; this file alone builds nothing.
#
#   docker build -t digits:1.0 build/container           # podman build and buildah build take the same words
#   docker run --rm --name digits --init --read-only --tmpfs /state:uid=10001,mode=0700,exec \
#       --cap-drop ALL --security-opt no-new-privileges -p 127.0.0.1:8080:8080 digits:1.0
#   docker exec digits cat /state/token                  # what every request must carry
#
# No compiler and no pip in /opt/venv; the server is not root; requests are taken on all addresses of the container,
# with the token; management and metrics stay on its loopback. The pins of requirements.txt were read under the Python
# version that BASE_IMAGE names. Compiled (aoti) models need a glibc in it no older than that of the machine that
# exported them.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS install
COPY requirements.txt /build/requirements.txt
RUN python -m venv --without-pip /opt/venv \
    && python -m pip --python /opt/venv/bin/python install --no-cache-dir --disable-pip-version-check \
        --no-deps --only-binary :all: -r /build/requirements.txt
COPY source/ /build/source/
RUN cp -r /build/source/. "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/" \
    && /opt/venv/bin/python -c "import deployer.cli.serve, deployer.predictor, deployer.serve"

FROM ${BASE_IMAGE}
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /state deployer \
    && install -d -o deployer -g deployer -m 0700 /state
COPY --from=install /opt/venv /opt/venv
COPY entrypoint.sh healthcheck.py /opt/deployer/
COPY models/ /models/
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
