"""The bill of materials of a package: NAME.mar.cdx.json beside it, in CycloneDX 1.6.

It lists the archive with its sha256 and, in it, the model with the sha256 of its artifact and of the checkpoint that it
was made from, every file of the bundle, the Python packages that serving it needs in the versions of this environment
with the licences that they name, and what their metadata does not show: the netty inside TorchServe's jar.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deployer.bundle import MANIFEST, Manifest
from deployer.errors import MachineError
from deployer.files import sha256_of, write_atomic
from deployer.formats import get_format
from deployer.package.container import ServedMar, serving_versions
from deployer.package.mar import BUNDLE_FOLDER, read_mar

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

INSTALL = "pip install 'deployer[sbom]'"

_JAR = "ts/frontend/model-server.jar"
_NETTY_VERSIONS = "META-INF/io.netty.versions.properties"
_NETTY_KEY = "netty-common.version="


def sbom_of(package: Path) -> Path:
    """Where the bill of materials of a package lies."""
    return package.with_name(f"{package.name}.cdx.json")


def write_sbom(package: Path) -> Path:
    """Write it for a .mar; returns where. Raises MachineError: no library for it, or a package to list is missing."""
    if importlib.util.find_spec("cyclonedx") is None:
        raise MachineError("a bill of materials needs cyclonedx-python-lib, which this machine lacks", install=INSTALL)
    from cyclonedx.model.bom import Bom
    from cyclonedx.output.json import JsonV1Dot6

    mar = read_mar(package)
    manifest = msgspec.json.decode(mar.read(f"{BUNDLE_FOLDER}/{MANIFEST}"), type=Manifest)
    digest = sha256_of(package)
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"sha256:{digest}"))  # the same package, the same number
    archive, model = _archive(package, digest, mar.version), _model(manifest)
    libraries = _libraries(serving_versions([ServedMar(mar, manifest)]))
    bom.metadata.component = archive
    bom.metadata.tools.components.add(_tool())
    inside = _inside_torchserve()
    bom.components.update((model, *libraries.values(), *inside))
    bom.register_dependency(archive, (model, *libraries.values()))
    for name, component in libraries.items():
        needed = [libraries[other] for other in _requirements(name) if other in libraries]
        bom.register_dependency(component, [*needed, *(inside if name == "torchserve" else ())])
    write_atomic(sbom_of(package), JsonV1Dot6(bom).output_as_string(indent=2).encode() + b"\n")
    return sbom_of(package)


def _archive(package: Path, digest: str, version: str) -> Component:
    from cyclonedx.model.component import Component, ComponentType

    return Component(
        name=package.name, version=version, type=ComponentType.APPLICATION, bom_ref="package", hashes=_sha256(digest)
    )


def _model(manifest: Manifest) -> Component:
    """The model; its files are components of it, the checkpoint is its ancestor."""
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component, ComponentType, Pedigree

    source = manifest.source
    artifact = get_format(manifest.target.format).artifact
    facts = {"target": manifest.target.slug, "weight_set": source.weight_set, "model": source.model}
    facts |= {} if source.step is None else {"step": str(source.step)}
    facts |= {"model_sha256": source.model_sha256} if source.model_sha256 else {}
    return Component(
        name=manifest.spec.name,
        version=manifest.spec.version,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
        hashes=_sha256(manifest.sha256[artifact]) if artifact in manifest.sha256 else (),
        properties=[Property(name=f"deployer:{name}", value=value) for name, value in facts.items()],
        pedigree=Pedigree(
            ancestors=[
                Component(
                    name=PurePosixPath(source.path).name,
                    type=ComponentType.MACHINE_LEARNING_MODEL,
                    bom_ref="checkpoint",
                    hashes=_sha256(source.sha256),
                )
            ]
        ),
        components=[
            Component(name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=_sha256(digest))
            for name, digest in manifest.sha256.items()
        ],
    )


def _tool() -> Component:
    from cyclonedx.model.component import Component, ComponentType

    return Component(name="deployer", version=metadata.version("deployer"), type=ComponentType.APPLICATION)


def _libraries(versions: Mapping[str, str]) -> dict[str, Component]:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    return {
        name: Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=f"{name}=={version}",
            purl=PackageURL("pypi", name=name, version=version),
            licenses=_licenses(name),
        )
        for name, version in versions.items()
    }


def _licenses(name: str) -> list[Any]:
    """What a distribution's metadata says: its SPDX expression, else its classifiers, else its free text."""
    from cyclonedx.factory.license import LicenseFactory

    found: Any = metadata.metadata(name)
    factory = LicenseFactory()
    if expression := found.get("License-Expression"):
        return [factory.make_from_string(expression)]
    classifiers = [text for text in found.get_all("Classifier") or () if text.startswith("License ::")]
    names = [text.rpartition(" :: ")[2] for text in classifiers if not text.endswith(":: OSI Approved")]
    lines = (found.get("License") or "").strip().splitlines()
    names = names or lines[:1]  # some put the whole text there
    return [factory.make_with_name(text) for text in names if text and text != "UNKNOWN"]


def _requirements(name: str) -> Iterable[str]:
    for requirement in map(Requirement, metadata.requires(name) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def _inside_torchserve() -> list[Component]:
    """Java libraries in TorchServe's jar that say which they are: netty alone does."""
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    jar = Path(str(metadata.distribution("torchserve").locate_file(_JAR)))
    with zipfile.ZipFile(jar) as archive:
        lines = archive.read(_NETTY_VERSIONS).decode().splitlines()
    version = next(line.removeprefix(_NETTY_KEY) for line in lines if line.startswith(_NETTY_KEY))
    return [
        Component(
            name="netty-all", group="io.netty", version=version, type=ComponentType.LIBRARY,
            bom_ref=f"io.netty:{version}", purl=PackageURL("maven", "io.netty", "netty-all", version),
        )
    ]  # fmt: skip


def _sha256(digest: str) -> list[Any]:
    from cyclonedx.model import HashAlgorithm, HashType

    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
