"""Archives: whole or absent, loadable by TorchServe's own loader, refused where they would serve wrongly."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import stat
import struct
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from deployer.bundle import Bundle, file_hashes, read_bundle, write_manifest
from deployer.errors import BundleError, DeployerError, GateError, IntegrityError, MachineError, UsageError
from deployer.export import export
from deployer.formats import Target
from deployer.machine import usable_cores
from deployer.package import ENGINES, get_engine, package
from deployer.package.mar import read_mar
from deployer.package.probe import BAD_BODY, judge, judge_refusal, make_probes
from deployer.package.record import Engine
from deployer.package.settings import body_limit_bytes, choose_settings
from deployer.package.torchserve import check_archive, read_settings
from deployer.protocol import JSON, encode_answer, encode_error
from deployer.spec import Dim, ModelSpec, TensorSpec
from tests.models import Detections, MixesRows, SequenceFirst, checkpoint_of


@pytest.fixture(scope="module")
def onnx(digits_bundles: Mapping[str, Path]) -> Bundle:
    return read_bundle(digits_bundles["onnx"])


@pytest.fixture(scope="module")
def archive(onnx: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(onnx, output=tmp_path_factory.mktemp("store"), batch_size=16, max_batch_delay_ms=5, workers=2)


def rebuilt(archive: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A copy of an archive with other contents."""
    with zipfile.ZipFile(archive) as source:
        files = {name: source.read(name) for name in source.namelist()}
    change(files)
    with zipfile.ZipFile(target, "w") as sink:
        for name, data in files.items():
            sink.writestr(name, data)
    return target


OWN_KEYS = (
    "workers", "intra_op_threads", "max_request_bytes", "max_response_bytes", "response_timeout_s", "max_queue_wait_s",
)  # fmt: skip


def with_config(archive: Path, target: Path, **changes: Any) -> Path:
    """A copy whose model-config.yaml differs; None removes a key."""

    def change(files: dict[str, bytes]) -> None:
        config = {**yaml.safe_load(files["model-config.yaml"]), **changes}
        kept = {key: value for key, value in config.items() if value is not None}
        files["model-config.yaml"] = yaml.safe_dump(kept).encode()

    return rebuilt(archive, target, change)


# --------------------------------------------------------------------------------------------------- what it holds


def test_the_archive_holds_bundle_handler_config_and_manifest(archive: Path, onnx: Bundle) -> None:
    mar = read_mar(archive)
    assert archive.name == "digits.mar"
    assert (mar.name, mar.version, mar.handler) == ("digits", onnx.spec.version, "deployer_handler.py")
    assert set(mar.entries) == {
        "MAR-INF/MANIFEST.json", "model-config.yaml", "openapi.json", "deployer_handler.py", "bundle/manifest.json",
        "bundle/manifest.json.sha256", *(f"bundle/{name}" for name in onnx.manifest.sha256),
    }  # fmt: skip
    assert mar.read("bundle/manifest.json") == (onnx.path / "manifest.json").read_bytes()
    settings = read_settings(mar)
    assert (settings.batch_size, settings.max_batch_delay_ms, settings.workers) == (16, 5, 2)
    assert settings.intra_op_threads == max(1, usable_cores() // 2)


def test_the_bundle_in_the_archive_is_whole(archive: Path, tmp_path: Path) -> None:
    read_mar(archive).extract(tmp_path, below="bundle")
    assert read_bundle(tmp_path).spec.name == "digits"


def test_defaults_follow_from_the_spec(onnx: Bundle) -> None:
    settings = choose_settings(onnx.manifest, batch_size=None, max_batch_delay_ms=None, workers=None)
    assert (settings.batch_size, settings.max_batch_delay_ms) == (onnx.spec.dims["batch"].typical, 2)
    assert settings.workers == min(2, usable_cores())
    assert settings.intra_op_threads == usable_cores() // settings.workers
    own = choose_settings(
        onnx.manifest, batch_size=None, max_batch_delay_ms=None, workers=usable_cores(), intra_op_threads=3
    )
    assert own.intra_op_threads == 3


def test_body_limits_cover_the_largest_request() -> None:
    """A volume of 112³ float32 in JSON exceeds TorchServe's default of 6,553,500 bytes."""
    spec = ModelSpec(
        "volume", (TensorSpec("x", "float32", ("b", 1, 112, 112, 112)),), dims={"b": Dim(1, 1, 2)}, batch="b"
    )
    body = msgspec.json.encode({"inputs": {"x": np.full((2, 1, 112, 112, 112), -1 / 3, np.float32).tolist()}})
    assert 6_553_500 < len(body) <= body_limit_bytes(spec, spec.inputs)
    small = ModelSpec("small", (TensorSpec("x", "float32", (3,)),))
    assert body_limit_bytes(small, small.inputs) == 6_553_500
    huge = ModelSpec("huge", (TensorSpec("x", "float32", (10**6, 10**6)),))
    assert body_limit_bytes(huge, huge.inputs) == 2**31 - 1


# --------------------------------------------------------------------------------------------------- refused settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 65}, "above 64"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"max_batch_delay_ms": 0}, "TorchServe reads 0 as 100"),
        ({"max_batch_delay_ms": -1}, "--max-batch-delay-ms -1"),
        ({"workers": 0}, "--workers 0"),
        ({"intra_op_threads": 0}, "--intra-op-threads 0"),
        ({"intra_op_threads": 2000}, "--intra-op-threads 2000"),
        ({"engine": "torchsreve"}, "did you mean 'torchserve'"),
    ],
)
def test_settings_that_would_be_bent_are_refused(onnx: Bundle, tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        package(onnx, output=tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Detections, "declares no batch axis"), (MixesRows, "a row in a batch of 4 is not answered as alone: output")],
)
def test_batching_is_refused_where_requests_cannot_share_a_run(kind: Any, said: str, tmp_path: Path) -> None:
    bundle, _ = export(checkpoint_of(kind), Target("torchscript"), tmp_path)
    with pytest.raises(UsageError, match=said):
        package(bundle, output=tmp_path, batch_size=4)
    archive = package(bundle.path, output=tmp_path)
    assert read_settings(read_mar(archive)).batch_size == 1


def test_a_batch_axis_in_the_middle_is_packaged(tmp_path: Path) -> None:
    bundle, _ = export(checkpoint_of(SequenceFirst), Target("onnx"), tmp_path)
    assert package(bundle, output=tmp_path).name == "sequence_first.mar"


def test_a_bundle_that_has_not_passed_is_refused(onnx: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "rejected"
    shutil.copytree(onnx.path, folder)
    write_manifest(folder, msgspec.structs.replace(onnx.manifest, passed=False))
    with pytest.raises(GateError, match="has not passed the gate"):
        package(folder, output=tmp_path / "store")


def report_with(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / "validation.json").read_text())
    (folder / "validation.json").write_text(json.dumps(document | changes))


def drop_stress_references(folder: Path) -> None:
    arrays = load_file(folder / "references.safetensors")
    save_file({name: array for name, array in arrays.items() if "zeros" not in name}, folder / "references.safetensors")


def drop_a_check(folder: Path) -> None:
    checks = json.loads((folder / "validation.json").read_text())["checks"]
    report_with(folder, checks=[check for check in checks if check["case"] != "batch=7"])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: report_with(folder, passed=False), "has not passed the gate"),
        (lambda folder: report_with(folder, reasons=["off"]), "has not passed the gate: off"),
        (drop_stress_references, "records no reference for the case 'floats zeros'"),
        (drop_a_check, "records no check that passed for the case 'batch=7'"),
    ],
)
def test_a_manifest_that_says_passed_is_held_to_the_other_files(
    spoil: Callable[[Path], None], words: str, onnx: Bundle, tmp_path: Path
) -> None:
    folder = tmp_path / "put_together"
    shutil.copytree(onnx.path, folder)
    spoil(folder)
    write_manifest(folder, msgspec.structs.replace(onnx.manifest, sha256=file_hashes(folder)))
    with pytest.raises(GateError, match=words):
        package(folder, output=tmp_path / "store")


def test_a_damaged_bundle_is_refused(onnx: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(onnx.path, folder)
    data = bytearray((folder / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.onnx").write_bytes(data)
    with pytest.raises(IntegrityError, match=r"model\.onnx"):
        package(folder, output=tmp_path / "store")


def test_a_missing_package_is_named_with_its_install_line() -> None:
    engine = Engine("other", "", lambda *_: Path(), ("no_such_module",), "serve")
    with pytest.raises(MachineError, match=r"no_such_module.*pip install 'deployer\[serve\]'"):
        engine.check_machine()
    assert all(get_engine(name) is record for name, record in ENGINES.items())


# ------------------------------------------------------------------------------------------------ whole or absent


def test_two_packagings_at_once_do_not_disturb_each_other(digits_bundles: Mapping[str, Path], tmp_path: Path) -> None:
    """torch-model-archiver's own command would work in one shared folder of the temporary directory for both."""
    before = set(Path(tempfile.gettempdir()).iterdir())
    made: dict[str, Path] = {}

    def run(name: str) -> None:
        made[name] = package(digits_bundles[name], output=tmp_path / name)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("onnx", "torchscript")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "bundle/model.onnx" in read_mar(made["onnx"]).entries
    assert "bundle/model.pt" in read_mar(made["torchscript"]).entries
    left = {path.name for path in set(Path(tempfile.gettempdir()).iterdir()) - before}
    assert not {name for name in left if name.startswith("deployer-mar-") or name == "digits"}


def test_an_archive_that_fails_its_check_leaves_the_older_one(
    onnx: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = package(onnx, output=tmp_path)
    data = older.read_bytes()
    broken = tmp_path / "deployer_handler.py"
    broken.write_text("import no_such_module\nclass Handler:\n    pass\n")
    monkeypatch.setattr(importlib.import_module("deployer.package.torchserve"), "handler_file", lambda: broken)
    with pytest.raises(GateError, match=r"failed its check under TorchServe's loader: .*no_such_module"):
        package(onnx, output=tmp_path)
    assert older.read_bytes() == data
    assert sorted(path.name for path in tmp_path.glob("d*")) == [broken.name, older.name, f"{older.name}.cdx.json"]


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        ("class One:\n    pass\nclass Two:\n    pass\n", "only one class"),
        (
            "from deployer.predictor import Predictor\nclass H:\n    def initialize(self, context):\n        pass\n"
            '    def handle(self, data, context):\n        return [b\'{"outputs": {"logits": [0]}}\'] * len(data)\n',
            "not its own 400",
        ),
        (
            "class H:\n    def initialize(self, context):\n        pass\n"
            "    def handle(self, data, context):\n        return [b'{}']\n",
            "answered with status 503",
        ),
    ],
)
def test_the_check_sees_handlers_that_would_serve_wrongly(
    archive: Path, tmp_path: Path, handler: str, said: str
) -> None:
    def change(files: dict[str, bytes]) -> None:
        files["deployer_handler.py"] = handler.encode()

    (tmp_path / "work").mkdir()
    with pytest.raises(GateError, match=said):
        check_archive(rebuilt(archive, tmp_path / "x.mar", change), tmp_path / "work")


def test_the_check_sees_answers_that_differ_from_the_reference(archive: Path, tmp_path: Path) -> None:
    """An archive whose recorded reference is another model's: hashes fit, answers do not."""
    mar = read_mar(archive)
    folder = tmp_path / "bundle"
    folder.mkdir()
    mar.extract(folder, below="bundle")
    bundle = read_bundle(folder)
    inputs, outputs = bundle.samples()
    from deployer.bundle import file_hashes, write_samples

    write_samples(folder, inputs, {"logits": outputs["logits"] + 1})
    write_manifest(folder, msgspec.structs.replace(bundle.manifest, sha256=file_hashes(folder)))

    def change(files: dict[str, bytes]) -> None:
        files.update({f"bundle/{path.name}": path.read_bytes() for path in folder.iterdir()})

    (tmp_path / "work").mkdir()
    with pytest.raises(GateError, match="output 'logits' of a sample differs"):
        check_archive(rebuilt(archive, tmp_path / "x.mar", change), tmp_path / "work")


def test_probes_tell_right_answers_from_wrong_ones(onnx: Bundle) -> None:
    probes = make_probes(onnx)
    assert {probe.content_type for probe in probes} == {JSON, "application/x-npy"}
    probe = probes[0]
    right = encode_answer(probe.expected, onnx.spec, JSON)
    assert judge(probe, onnx, 200, right, JSON) == ""
    wrong = encode_answer({"logits": probe.expected["logits"][::-1]}, onnx.spec, JSON)
    assert "differs" in judge(probe, onnx, 200, wrong, JSON)
    for status, body in ((500, right), (200, b"{}"), (200, b'{"outputs": {}}'), (200, b'{"outputs": {"logits": [1]}}')):
        assert judge(probe, onnx, status, body, JSON)
    assert judge_refusal(400, encode_error("no", field="no such input")) == ""
    for status, body in ((200, b"{}"), (400, b"{}"), (503, BAD_BODY), (400, b"no")):
        assert judge_refusal(status, body)


# ------------------------------------------------------------------------------------------------ archives of others


@pytest.mark.parametrize("name", ["x/../../evil.txt", "/evil.txt", "..\\evil.txt", "C:evil.txt", "a/../b"])
def test_entries_that_climb_are_refused_by_name(archive: Path, tmp_path: Path, name: str) -> None:
    bad = rebuilt(archive, tmp_path / "bad.mar", lambda files: files.update({name: b"evil\n"}))
    with pytest.raises(BundleError) as caught:
        read_mar(bad)
    assert name in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.mar"]


def test_links_are_refused_by_name(archive: Path, tmp_path: Path) -> None:
    bad = shutil.copy(archive, tmp_path / "bad.mar")
    with zipfile.ZipFile(bad, "a") as target:
        info = zipfile.ZipInfo("link.txt")
        info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        target.writestr(info, "/etc/hostname")
    with pytest.raises(BundleError, match=r"link\.txt"):
        read_mar(bad)


def hide_an_entry(data: bytes, place: str) -> bytes:
    """An archive with an entry that Java's stream reads and that the directory does not list."""
    hidden = io.BytesIO()
    with zipfile.ZipFile(hidden, "w") as sink:
        sink.writestr("deployer_handler.py", "raise SystemExit('it ran')\n")
    entry = hidden.getvalue()[: hidden.getvalue().index(b"PK\x01\x02")]
    directory = data.index(b"PK\x01\x02")
    if place == "start":  # zipfile finds the directory by its end and takes the rest for a prefix
        return entry + data
    out = bytearray(data[:directory] + entry + data[directory:])
    end = out.rindex(b"PK\x05\x06")
    struct.pack_into("<I", out, end + 16, directory + len(entry))
    return bytes(out)


@pytest.mark.parametrize("place", ["start", "end"])
def test_entries_that_the_directory_does_not_list_are_refused(archive: Path, tmp_path: Path, place: str) -> None:
    bad = tmp_path / "bad.mar"
    bad.write_bytes(hide_an_entry(archive.read_bytes(), place))
    with zipfile.ZipFile(bad) as zipped:  # to Python it is the archive that it was
        assert zipped.testzip() is None
        assert zipped.namelist() == zipfile.ZipFile(archive).namelist()
    with pytest.raises(BundleError, match=r"does not begin where|stand between its entries and its directory"):
        read_mar(bad)


def test_a_head_that_differs_from_the_directory_is_refused(archive: Path, tmp_path: Path) -> None:
    data = archive.read_bytes()
    bad = tmp_path / "bad.mar"
    bad.write_bytes(data.replace(b"model-config.yaml", b"model-config.yamx", 1))  # the first is the head
    with pytest.raises(BundleError, match=r"'model-config\.yaml' has another head \('model-config\.yamx'\)"):
        read_mar(bad)


def test_yaml_that_asks_for_objects_is_refused(archive: Path, tmp_path: Path) -> None:
    """CVE-2022-1471: SnakeYAML made what a tag names."""
    tag = b'!!javax.script.ScriptEngineManager [!!java.net.URLClassLoader [[!!java.net.URL ["http://127.0.0.1:1/"]]]]\n'
    for text in (tag, b"batchSize: " + tag):
        bad = rebuilt(archive, tmp_path / "bad.mar", lambda files, text=text: files.update({"model-config.yaml": text}))
        with pytest.raises(BundleError, match=r"model-config\.yaml' cannot be read: could not determine a constructor"):
            read_mar(bad)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_doubled_entries_are_refused_by_name(archive: Path, tmp_path: Path) -> None:
    bad = shutil.copy(archive, tmp_path / "bad.mar")
    with zipfile.ZipFile(bad, "a") as target:
        target.writestr("deployer_handler.py", "evil")
    with pytest.raises(BundleError, match=r"deployer_handler\.py' is there twice"):
        read_mar(bad)


def test_a_bomb_is_refused_and_not_expanded(archive: Path, tmp_path: Path) -> None:
    bad = shutil.copy(archive, tmp_path / "bad.mar")
    with (
        zipfile.ZipFile(bad, "a", zipfile.ZIP_DEFLATED) as target,
        target.open("zeros.bin", "w", force_zip64=True) as file,
    ):
        for _ in range(200):
            file.write(bytes(1 << 20))
    with pytest.raises(BundleError, match=r"zeros\.bin.*209715200"):
        read_mar(bad)
    with pytest.raises(BundleError, match="expands to"):
        read_mar(archive, limit_bytes=1000)


@pytest.mark.parametrize("keep", [0, 10, 1000, -10])
def test_truncated_archives_are_refused(archive: Path, tmp_path: Path, keep: int) -> None:
    bad = tmp_path / "bad.mar"
    bad.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(BundleError, match=r"bad\.mar.*truncated or corrupt"):
        read_mar(bad)


def test_a_flipped_byte_is_found_while_unpacking(archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    position = data.index(b"class DeployerHandler")
    data[position] ^= 1
    bad = tmp_path / "bad.mar"
    bad.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=r"deployer_handler\.py"):
        read_mar(bad).extract(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("MAR-INF/MANIFEST.json", b"{"),
        ("MAR-INF/MANIFEST.json", b"[]"),
        ("MAR-INF/MANIFEST.json", json.dumps({"model": {}}).encode()),
        ("model-config.yaml", b"a: ["),
        ("model-config.yaml", b"!!python/object/apply:os.getcwd []"),
        ("model-config.yaml", b"- 1"),
    ],
)
def test_documents_that_are_none_are_refused(archive: Path, tmp_path: Path, name: str, data: bytes) -> None:
    bad = rebuilt(archive, tmp_path / "bad.mar", lambda files: files.update({name: data}))
    with pytest.raises(BundleError):
        read_mar(bad)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 5, "batchSize": None}, "'batch_size'.*did you mean 'batchSize'"),
        ({"batchsize": 5}, "'batchsize'.*did you mean 'batchSize'"),
        ({"maxBatchDelayMs": 200}, "'maxBatchDelayMs'.*did you mean 'maxBatchDelay'"),
        ({"batchSize": "5"}, "batchSize: '5'.*int is expected"),
        ({"batchSize": 2.0}, "batchSize: 2.0"),
        ({"batchSize": True}, "batchSize: True"),
        ({"batchSize": 0}, "batchSize: 0"),
        ({"maxBatchDelay": -1}, "maxBatchDelay: -1"),
        ({"maxBatchDelay": 0}, "maxBatchDelay: 0"),
        ({"batchSize": None}, "lacks 'batchSize'"),
        ({"minWorkers": 0}, "minWorkers: 0"),
        ({"maxWorkers": 9}, "maxWorkers: 9; 2 is expected with 2 workers"),
        ({"deployer": None}, "section 'deployer'"),
        ({"deployer": {"intra_op_threads": 1}}, "section 'deployer'"),
        ({"deployer": {**dict.fromkeys(OWN_KEYS, 1), "intra_op_threads": 0}}, "intra_op_threads: 0"),
        ({"deployer": {**dict.fromkeys(OWN_KEYS, 1), "response_timeout_s": "9"}}, "response_timeout_s: '9'"),
    ],
)
def test_batch_settings_that_torchserve_would_ignore_are_refused_by_key(
    archive: Path, tmp_path: Path, changes: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        read_settings(read_mar(with_config(archive, tmp_path / "x.mar", **changes)))


def test_torchserves_own_keys_are_allowed(archive: Path, tmp_path: Path) -> None:
    read_settings(read_mar(with_config(archive, tmp_path / "x.mar", deviceType="cpu", maxRetryTimeoutInSec=60)))


def test_errors_are_one_line(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(DeployerError) as caught:
        read_settings(read_mar(with_config(archive, tmp_path / "x.mar", nothing_like_it=1)))
    assert "\n" not in str(caught.value)
