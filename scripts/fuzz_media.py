"""Right bodies of the binary kinds for schemathesis, which knows none: arrays of a bundle, one item or more."""

from __future__ import annotations

import os

import schemathesis

from deployer.bundle import read_bundle
from deployer.protocol import NPY, NPZ, SAFETENSORS, encode_request
from tests.hostile import arrays_of

SPEC = read_bundle(os.environ["DEPLOYER_FUZZ_BUNDLE"]).spec

for kind in (NPY, NPZ, SAFETENSORS):
    schemathesis.openapi.media_type(kind, arrays_of(SPEC).map(lambda made, kind=kind: encode_request(made, kind).body))
