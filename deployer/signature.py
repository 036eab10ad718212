"""Signatures of files and folders with a key of one's own, by the PyPI package model-signing (Sigstore's format).

    sign(Path("digits.mar"), Path("key.pem"))                          writes digits.mar.sig
    verify(Path("digits.mar"), Path("digits.mar.sig"), Path("pub.pem"))

Hashes say that a file is as it was written; a signature says who wrote it. The signature of `X` is `X.sig`, beside it.
A folder's covers every file in it, and no other file may be there. The package's own command reads them:
`model_signing verify key digits.mar --signature digits.mar.sig --public_key pub.pem`.

Keys are elliptic (P-256, P-384, P-521), in PEM files without a password.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
from pathlib import Path
from typing import Any, cast

import msgspec

from deployer.errors import IntegrityError, MachineError, UsageError, first_line
from deployer.files import atomic_file

#: the public key that archives and bundles must be signed with, for `deployer serve`, its workers and a container
KEY_VARIABLE = "DEPLOYER_VERIFY_KEY"
INSTALL = "pip install 'deployer[sign]'"

MODULES = ("model_signing", "OpenSSL")  # model-signing imports the second and does not declare it
_SIGNATURE_LIMIT_BYTES = 16 * 2**20


def signature_of(path: Path) -> Path:
    """Where the signature of a file or folder lies."""
    return path.with_name(f"{path.name}.sig")


def configured_key() -> Path | None:
    """The public key that the environment names, or None. Raises UsageError when there is no such file."""
    name = os.environ.get(KEY_VARIABLE, "")
    if name and not Path(name).is_file():
        raise UsageError(f"{KEY_VARIABLE} names '{name}', which is no file; give the public key's PEM file")
    return Path(name) if name else None


def sign(path: Path, private_key: Path) -> Path:
    """Write `path`'s signature; returns where. Raises UsageError for what is no key, MachineError."""
    _check_installed()
    from model_signing import signing

    try:
        config = cast(Any, signing.Config)().use_elliptic_key_signer(private_key=private_key)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # also: a password is asked for, an RSA key
        raise _no_key("--sign-key", private_key, "private", error) from error
    config.set_hashing_config(_hashing())
    target = signature_of(path)
    with atomic_file(target) as temporary:
        config.sign(path, temporary)
    return target


def verify(path: Path, public_key: Path) -> None:
    """Hold a file or folder to its signature. Raises IntegrityError: not signed, by another key, changed since."""
    _check_installed()
    from model_signing import verifying

    try:
        config = cast(Any, verifying.Config)().use_elliptic_key_verifier(public_key=public_key)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _no_key("--verify-key", public_key, "public", error) from error
    config.set_hashing_config(_hashing())
    signature = signature_of(path)
    if not signature.is_file():
        raise IntegrityError(f"'{path}' is not signed, there is no '{signature}'; sign it with --sign-key")
    if signature.stat().st_size > _SIGNATURE_LIMIT_BYTES:
        raise IntegrityError(f"'{signature}' has more than {_SIGNATURE_LIMIT_BYTES} bytes; it is no signature")
    if (signer := signer_of(path)) != _fingerprint(public_key):
        raise IntegrityError(
            f"'{path}' is signed with another key ({signer[:16] or 'unnamed'}…) than that of '{public_key}'"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the package prints its warnings
            config.verify(path, signature)
    except Exception as error:  # the package raises whatever its parsers do; all of it means no
        raise IntegrityError(f"'{path}' is not what '{signature}' was made for: {_difference(error)}") from error


def signer_of(path: Path) -> str:
    """The key that the signature beside `path` names, as sha256 of its public PEM: a claim, not a proof. "" without."""
    try:
        document: Any = msgspec.json.decode(signature_of(path).read_bytes())
        return str(document["verificationMaterial"]["publicKey"]["hint"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return ""


def _difference(error: Exception) -> str:
    """The package's error without its digests: which files are others, too many or missing."""
    text = str(error)
    if not text:
        return "it was not made with this key"
    if not text.startswith("Signature mismatch"):
        return first_line(error)
    try:
        lines = [str(line) for line in ast.literal_eval(text.partition(": ")[2])]
    except (ValueError, SyntaxError, TypeError):
        return first_line(error)
    found = "\n".join(lines)
    changed = [name for name in re.findall(r"^Hash mismatch for '(.+?)': ", found, re.MULTILINE) if name != "."]
    parts = [f"{', '.join(changed)} changed"] if changed else []
    parts += [f"{name} was added" for name in re.findall(r"^Extra files .*?': (.+)$", found, re.MULTILINE)]
    parts += [f"{name} is missing" for name in re.findall(r"^Missing files .*?': (.+)$", found, re.MULTILINE)]
    return "; ".join(parts) or "its contents changed"


def _fingerprint(public_key: Path) -> str:
    """As model-signing writes it into a signature."""
    import hashlib

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    key = load_pem_public_key(public_key.read_bytes())
    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _hashing() -> Any:
    """Every file counts; by default `.gitignore` and its like would not."""
    from model_signing import hashing

    return cast(Any, hashing.Config)().set_ignored_paths(paths=[], ignore_git_paths=False)


def _no_key(option: str, path: Path, kind: str, error: Exception) -> UsageError:
    return UsageError(
        f"{option} '{path}' is no {kind} key in PEM, P-256, P-384 or P-521, without a password: {first_line(error)}"
    )


def _check_installed() -> None:
    if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        raise MachineError(f"signatures need {', '.join(missing)}, which this machine lacks", install=INSTALL)
