"""Archives signed with a key of one's own: what is unsigned, signed by others or altered does not run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from deployer.bundle import file_hashes, read_bundle, write_manifest
from deployer.errors import GateError, IntegrityError, MachineError, UsageError
from deployer.inspection import inspect
from deployer.package import HookFiles, package
from deployer.package.container import build_context
from deployer.package.mar import read_mar
from deployer.predictor import Predictor
from deployer.serve import Server
from deployer.signature import KEY_VARIABLE, sign, signature_of, signer_of, verify
from tests.test_cli import assert_one_line_error, deployer
from tests.test_package_torchserve import rebuilt
from tests.test_serve_torchserve import ANY_PORT, instances

HOOKS = "import helper\n\ndef postprocess(outputs):\n    return helper.answer(outputs)\n"
HELPER = "def answer(outputs):\n    return {'digit': int(outputs['logits'].argmax())}\n"


@dataclass(frozen=True)
class Keys:
    private: Path
    public: Path


def make_keys(folder: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> Keys:
    folder.mkdir()
    keys = Keys(folder / "key.pem", folder / "pub.pem")
    keys.private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    keys.public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys") / "ours", ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys") / "theirs", ec.generate_private_key(ec.SECP384R1()))


@pytest.fixture(scope="module")
def archive(digits_bundles: Mapping[str, Path], keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Signed, with hooks of two files."""
    store = tmp_path_factory.mktemp("store")
    (store / "hooks.py").write_text(HOOKS)
    (store / "helper.py").write_text(HELPER)
    hooks = HookFiles(store / "hooks.py", (store / "helper.py",))
    return package(digits_bundles["onnx"], output=store, workers=1, hooks=hooks, sign_key=keys.private)


def copy_of(archive: Path, folder: Path) -> Path:
    """The archive and its signature in another place."""
    shutil.copyfile(signature_of(archive), signature_of(folder / archive.name))
    return shutil.copyfile(archive, folder / archive.name)


# ------------------------------------------------------------------------------------------------------- the archive


def test_a_signed_archive_is_served_by_workers_that_hold_it_to_its_signatures(archive: Path, keys: Keys) -> None:
    with Server([archive], verify_key=keys.public, **ANY_PORT) as server:
        environment = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        assert f"{KEY_VARIABLE}={keys.public}".encode() in environment
        headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
        body = server.endpoints[0].sample.read_bytes()
        answer = httpx.post(server.endpoints[0].url, content=body, headers=headers, timeout=60)
        assert list(answer.json()) == ["digit"]


@pytest.mark.parametrize("place", ["name", "middle", "end", "signature"])
def test_one_flipped_bit_is_refused(archive: Path, keys: Keys, tmp_path: Path, place: str) -> None:
    copy = copy_of(archive, tmp_path)
    path = signature_of(copy) if place == "signature" else copy
    data = bytearray(path.read_bytes())
    data[{"name": 40, "middle": len(data) // 2, "end": len(data) - 1, "signature": len(data) // 2}[place]] ^= 1
    path.write_bytes(data)
    before = instances()
    with pytest.raises(IntegrityError, match=r"digits\.mar"), Server([copy], verify_key=keys.public, **ANY_PORT):
        pass
    assert instances() == before


def test_an_unsigned_archive_is_refused(archive: Path, keys: Keys, tmp_path: Path) -> None:
    copy = shutil.copyfile(archive, tmp_path / "digits.mar")
    with pytest.raises(IntegrityError, match=r"is not signed, there is no .*digits\.mar\.sig"):
        Server([copy], verify_key=keys.public, **ANY_PORT).start()


def test_another_key_is_refused_by_name(archive: Path, other: Keys, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="is signed with another key"):
        verify(archive, other.public)
    copy = copy_of(archive, tmp_path)
    sign(copy, other.private)
    verify(copy, other.public)


def test_a_signature_that_claims_our_key_without_having_it_is_refused(
    archive: Path, keys: Keys, other: Keys, tmp_path: Path
) -> None:
    copy = copy_of(archive, tmp_path)
    ours = signer_of(copy)
    sign(copy, other.private)
    forged = signature_of(copy).read_text().replace(signer_of(copy), ours)
    signature_of(copy).write_text(forged)
    with pytest.raises(IntegrityError, match=r"was not made with this key|is not what"):
        verify(copy, keys.public)


def test_a_signature_of_something_else_is_refused(archive: Path, keys: Keys, tmp_path: Path) -> None:
    """The right key, the wrong thing: the signature of the bundle in the archive under the archive's name."""
    copy = shutil.copyfile(archive, tmp_path / "digits.mar")
    signature_of(copy).write_bytes(read_mar(archive).read("bundle.sig"))
    with pytest.raises(IntegrityError, match="is not what"):
        verify(copy, keys.public)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff\xfe", b"null", b'{"mediaType": 7}'])
def test_what_is_no_signature_is_refused(archive: Path, keys: Keys, tmp_path: Path, data: bytes) -> None:
    copy = shutil.copyfile(archive, tmp_path / "digits.mar")
    signature_of(copy).write_bytes(data)
    with pytest.raises(IntegrityError):
        verify(copy, keys.public)


def test_nothing_of_an_archive_is_read_before_its_signature(keys: Keys, tmp_path: Path) -> None:
    """A file that is no archive at all gets the word about its signature, not that about zip."""
    (tmp_path / "x.mar").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(IntegrityError, match="is not signed"):
        Server([tmp_path / "x.mar"], verify_key=keys.public, **ANY_PORT).start()


def test_packaging_again_without_a_key_takes_the_old_signature_away(
    archive: Path, digits_bundles: Mapping[str, Path], tmp_path: Path
) -> None:
    copy = copy_of(archive, tmp_path)
    again = package(digits_bundles["onnx"], output=tmp_path, workers=1)
    assert again == copy
    assert not signature_of(copy).exists()


def test_a_container_gets_the_signature_and_what_verifies_it(archive: Path, tmp_path: Path) -> None:
    context = build_context([archive], tmp_path / "context")
    assert (context / "models/digits.mar.sig").read_bytes() == signature_of(archive).read_bytes()
    pins = (context / "requirements.txt").read_text()
    assert re.search(r"^model-signing==", pins, re.MULTILINE)
    assert re.search(r"^pyopenssl==", pins, re.MULTILINE)


def test_inspect_says_whether_it_is_signed(archive: Path, keys: Keys, tmp_path: Path) -> None:
    assert signer_of(archive) in inspect(archive).facts["signed"]
    assert inspect(shutil.copyfile(archive, tmp_path / "digits.mar")).facts["signed"] == "no"


def test_the_packages_own_command_reads_it(archive: Path, keys: Keys) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "key", archive, "--signature", signature_of(archive)]
    done = subprocess.run([*command, "--public_key", keys.public], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------- the worker


@pytest.fixture
def unpacked(archive: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    read_mar(archive).extract(folder)
    return folder


def test_a_worker_opens_what_is_signed(unpacked: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(keys.public))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for _ in range(2):  # the second finds nothing that the first left among the signed files
        Predictor.open(unpacked / "bundle", hooks_file=unpacked / "hooks" / "main.py").close()


def test_a_worker_refuses_a_bundle_whose_hashes_were_made_anew(
    unpacked: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes alone are no proof: whoever changes the weights can write them again."""
    folder = unpacked / "bundle"
    data = bytearray((folder / "model.onnx").read_bytes())
    data[-100] ^= 1
    (folder / "model.onnx").write_bytes(data)
    with pytest.raises(IntegrityError, match=r"model\.onnx' differs from its recorded sha256"):
        Predictor.open(folder)
    manifest = read_bundle(folder, verify=False).manifest
    write_manifest(folder, msgspec.structs.replace(manifest, sha256=file_hashes(folder)))
    monkeypatch.setenv(KEY_VARIABLE, str(keys.public))
    with pytest.raises(
        IntegrityError, match=r"bundle.sig' was made for: manifest.json, manifest.json.sha256, model.onnx changed"
    ):
        Predictor.open(folder)


@pytest.mark.parametrize("name", [".gitignore", "__pycache__/main.cpython-311.pyc", "helper.py"])
def test_a_worker_refuses_other_files_among_the_hooks(
    unpacked: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = unpacked / "hooks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('it ran')\n")
    monkeypatch.setenv(KEY_VARIABLE, str(keys.public))
    with pytest.raises(IntegrityError, match=rf"hooks\.sig' was made for: .*{re.escape(name)}"):
        Predictor.open(unpacked / "bundle", hooks_file=unpacked / "hooks" / "main.py")


def test_a_worker_refuses_an_unsigned_bundle(
    digits_bundles: Mapping[str, Path], keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(keys.public))
    with pytest.raises(IntegrityError, match="is not signed"):
        Predictor.open(digits_bundles["onnx"])
    monkeypatch.setenv(KEY_VARIABLE, "/nonexistent/key.pem")
    with pytest.raises(UsageError, match=r"names '/nonexistent/key\.pem', which is no file"):
        Predictor.open(digits_bundles["onnx"])


def test_a_worker_of_a_real_server_refuses_by_name(archive: Path, keys: Keys, tmp_path: Path) -> None:
    """The archive is signed as it is, but what it holds was changed before that: the worker finds it."""

    def change(files: dict[str, bytes]) -> None:
        files["hooks/main.py"] += b"\n"

    copy = rebuilt(archive, tmp_path / "digits.mar", change)
    sign(copy, keys.private)
    with (
        pytest.raises(GateError, match=r"IntegrityError.*hooks.*main\.py|hooks' is not what"),
        Server([copy], verify_key=keys.public, **ANY_PORT),
    ):
        pass


# ---------------------------------------------------------------------------------------------------------- the keys


def test_what_is_no_key_is_refused_in_one_line(
    digits_bundles: Mapping[str, Path], keys: Keys, tmp_path: Path, archive: Path
) -> None:
    wrong = make_keys(tmp_path / "rsa", rsa.generate_private_key(public_exponent=65537, key_size=2048))
    locked = tmp_path / "locked.pem"
    key = ec.generate_private_key(ec.SECP256R1())
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    for path in (wrong.private, keys.public, locked, tmp_path / "absent.pem", archive):
        with pytest.raises(UsageError, match=r"--sign-key .* is no private key in PEM"):
            package(digits_bundles["onnx"], output=tmp_path / "store", sign_key=path)
    assert not (tmp_path / "store" / "digits.mar").exists()
    for path in (wrong.public, keys.private, tmp_path / "absent.pem", archive):
        with pytest.raises(UsageError, match=r"--verify-key .* is no public key in PEM"):
            verify(archive, path)


def test_without_the_package_it_is_said(archive: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"pip install 'deployer\[sign\]'"):
        verify(archive, keys.public)


def test_the_command_line(digits_bundles: Mapping[str, Path], keys: Keys, other: Keys, tmp_path: Path) -> None:
    made = deployer(
        "package", digits_bundles["onnx"], "-o", tmp_path, "--sign-key", keys.private, "--no-serve-check", "--json"
    )
    assert json.loads(made.stdout)["signature"] == str(tmp_path / "digits.mar.sig")
    with zipfile.ZipFile(tmp_path / "digits.mar") as mar:
        assert "bundle.sig" in mar.namelist()
    serve = ["serve", tmp_path / "digits.mar", "--port", "0", "--management-port", "0", "--metrics-port", "0"]
    refused = deployer(*serve, "--verify-key", other.public)
    assert_one_line_error(refused, 2, "digits.mar' is signed with another key")


def test_the_environment_of_a_container_names_the_key(
    archive: Path, other: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(other.public))
    assert_one_line_error(deployer("serve", archive, "--port", "0"), 2, "is signed with another key")
