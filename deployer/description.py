"""What a served model says of itself: an OpenAPI 3.1 document, and the Open Inference Protocol's model metadata.

Both follow from the spec. The schemas say all that JSON Schema can: names, dtypes as ranges of numbers, ranks, sizes,
ranges of every axis. What it cannot say is checked all the same and told by a 400: that two inputs agree about an axis,
that inner rows are of one length, that the shape of an Open Inference tensor is that of its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from deployer.protocol import JSON, NPY, NPZ, NULLS, SAFETENSORS
from deployer.protocol.media import BINARY
from deployer.protocol.oip import DATATYPES, HEADER_LENGTH
from deployer.spec import ANY, ModelSpec, TensorSpec

#: the last part of the path of a request that asks for a description, whatever the engine puts before it
OPENAPI = "openapi.json"
METADATA = "metadata"
DESCRIPTIONS = (OPENAPI, METADATA)
OPENAPI_TYPE = "application/vnd.oai.openapi+json"

Schema = dict[str, Any]


@dataclass(frozen=True)
class Routes:
    """Where an engine takes requests: paths for every kind of body, those of the Open Inference Protocol, and those of
    what it says of the model."""

    predict: Sequence[str] = ()
    infer: Sequence[str] = ()
    openapi: Sequence[str] = ()
    metadata: Sequence[str] = ()


def model_metadata(spec: ModelSpec, platform: str) -> Schema:
    """`GET /v2/models/NAME` of the Open Inference Protocol; -1 is a size that is not fixed."""

    def tensor(entry: TensorSpec) -> Schema:
        shape = [size if isinstance(size, int) else -1 for size in entry.shape]
        return {"name": entry.name, "datatype": DATATYPES[entry.dtype], "shape": shape}

    return {
        "name": spec.name,
        "versions": [spec.version],
        "platform": platform,
        "inputs": [tensor(entry) for entry in spec.inputs],
        "outputs": [tensor(entry) for entry in spec.outputs],
    }


def openapi(spec: ModelSpec, routes: Routes, *, max_request_bytes: int | None = None, hooks: bool = False) -> Schema:
    """The OpenAPI document of a model at `routes`. `hooks`: user code may read other requests and answer otherwise."""
    limit = f" A body has at most {max_request_bytes} bytes." if max_request_bytes is not None else ""
    paths: Schema = {}
    for path in routes.predict:
        paths[path] = {
            "post": _operation(
                path, _bodies(spec, hooks), _answers(spec, hooks), f"Answer one item or a batch.{limit}"
            ),
        }
    for path in routes.infer:
        body, answer = {JSON: {"schema": _ref("InferRequest")}}, {JSON: {"schema": _ref("InferAnswer")}}
        paths[path] = {"post": _operation(path, body, answer, f"The Open Inference Protocol, version 2.{limit}")}
    for path in routes.openapi:
        paths[path] = _description(path, "This document.", OPENAPI_TYPE, {"type": "object"})
    for path in routes.metadata:
        paths[path] = _description(path, "The metadata of the Open Inference Protocol.", JSON, _ref("ModelMetadata"))
    return {
        "openapi": "3.1.0",
        "info": {"title": spec.name, "version": spec.version, "description": _words(spec)},
        "paths": paths,
        "components": {
            "schemas": _components(spec),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def encode(document: Schema) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


# ----------------------------------------------------------------------------------------------------------- operations


def _operation(path: str, bodies: Schema, answers: Schema, words: str) -> Schema:
    nulls = {"description": "how many values of which outputs are null: JSON has no NaN", "schema": {"type": "string"}}
    return {
        "operationId": f"post {path}",
        "description": words,
        "requestBody": {"required": True, "content": bodies},
        "responses": {
            "200": {"description": "The model's outputs.", "content": answers, "headers": {NULLS: nulls}},
            **_refusals(),
        },
    }


def _description(path: str, words: str, kind: str, schema: Schema) -> Schema:
    answer = {"200": {"description": words, "content": {kind: {"schema": schema}}}}
    return {"get": {"operationId": f"get {path}", "description": words, "responses": {**answer, **_refusals()}}}


def _refusals() -> Schema:
    own, server = _ref("Error"), _ref("ServerError")
    told = {
        "400": ("The request is at fault, or it has no token.", {"anyOf": [own, server]}),
        "404": ("There is no such model, version or path.", {"anyOf": [own, server]}),
        "405": ("The server does not do that here.", server),
        "406": ("No kind of answer that Accept allows exists.", own),
        "413": ("The body is larger than the model takes.", {"anyOf": [own, server]}),
        "415": ("That content type, charset or compression is not understood.", own),
        "500": ("The model failed on this request, or its worker died.", {"anyOf": [own, server]}),
        "503": ("Too many wait, the queue is full, or no worker is there.", {"anyOf": [own, server]}),
        "504": ("The model did not answer in time.", own),
    }
    refusals: Schema = {
        status: {"description": words, "content": {JSON: {"schema": schema}}}
        for status, (words, schema) in told.items()
    }
    retry = {"description": "seconds after which to come back", "schema": {"type": "integer", "minimum": 1}}
    refusals["503"]["headers"] = {"Retry-After": retry}
    return refusals


def _bodies(spec: ModelSpec, hooks: bool) -> Schema:
    kinds = ([NPY] if len(spec.inputs) == 1 else []) + [NPZ, SAFETENSORS]
    content: Schema = {JSON: {"schema": _ref("Request")}, **{kind: {"schema": _binary(kind)} for kind in kinds}}
    if hooks:
        content["*/*"] = {"schema": {"description": "What the user's preprocess takes."}}
    return content


def _answers(spec: ModelSpec, hooks: bool) -> Schema:
    if hooks:
        return {"*/*": {"schema": {"description": "What the user's postprocess answers, or the outputs."}}}
    kinds = ([NPY] if len(spec.outputs) == 1 else []) + [NPZ, SAFETENSORS]
    return {JSON: {"schema": _ref("Answer")}, **{kind: {"schema": _binary(kind)} for kind in kinds}}


def _binary(kind: str) -> Schema:
    return {"type": "string", "format": "binary", "contentMediaType": kind}


# -------------------------------------------------------------------------------------------------------------- schemas


def _components(spec: ModelSpec) -> Schema:
    forms = [False, True] if spec.stackable else [False]
    requests = {("Item" if one else "Batch"): _named(spec, spec.inputs, one) for one in forms}
    answers = {
        ("ItemOutputs" if one else "BatchOutputs"): _named(spec, spec.outputs, one, answer=True) for one in forms
    }
    inputs: list[Schema] = [_ref(name) for name in requests]
    if len(spec.inputs) == 1:  # the sole input without its name
        inputs += [next(iter(schema["properties"].values())) for schema in requests.values()]
    bare = [] if any(tensor.name == "inputs" for tensor in spec.inputs) else [_ref(name) for name in requests]
    text = {"type": "string"}
    label: Schema = {"type": ["string", "null", "array"]}
    return {
        **requests,
        **answers,
        "Request": {"anyOf": [_object({"inputs": {"anyOf": inputs}}), *bare]},
        "Answer": _object(
            {"model": {"const": spec.name}, "version": {"const": spec.version},
             "outputs": {"anyOf": [_ref(name) for name in answers]},
             "labels": {"type": "object", "additionalProperties": label}},
            optional=("labels",),
        ),
        "InferRequest": _object(
            {"id": text, "inputs": _tensors(spec.inputs, spec), "outputs": _asked(spec),
             "parameters": _object({"binary_data_output": {"const": False}}, optional=("binary_data_output",))},
            optional=("id", "outputs", "parameters"),
        ),
        "InferAnswer": _object(
            {"model_name": {"const": spec.name}, "model_version": {"const": spec.version}, "id": text,
             "parameters": {"type": "object", "additionalProperties": text},
             "outputs": {"type": "array", "minItems": 1,
                         "items": {"anyOf": [_tensor(entry, spec, True) for entry in spec.outputs]}}},
            optional=("id", "parameters"),
        ),
        "ModelMetadata": _object(
            {"name": {"const": spec.name}, "versions": {"type": "array", "items": text}, "platform": text,
             "inputs": {"type": "array", "items": _ref("TensorMetadata")},
             "outputs": {"type": "array", "items": _ref("TensorMetadata")}}
        ),
        "TensorMetadata": _object(
            {"name": text, "datatype": {"enum": list(DATATYPES.values())},
             "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}}}
        ),
        "Error": _object({"error": _object({"message": text, "field": text, "expected": text, "got": text})}),
        "ServerError": _object({"code": {"type": "integer"}, "type": text, "message": text}),
    }  # fmt: skip


def _named(spec: ModelSpec, tensors: Iterable[TensorSpec], one_item: bool, *, answer: bool = False) -> Schema:
    return _object({tensor.name: _array(tensor, spec, one_item, answer) for tensor in tensors})


def _array(tensor: TensorSpec, spec: ModelSpec, one_item: bool, answer: bool) -> Schema:
    """Nested arrays of a tensor's shape, without the batch axis for one item."""
    schema = _value(tensor, answer)
    for size in reversed([size for size in tensor.shape if not (one_item and size == spec.batch)]):
        schema = {"type": "array", "items": schema, **_limits(size, spec)}
    return schema


def _limits(size: int | str, spec: ModelSpec) -> Schema:
    if size == ANY:
        return {}
    if isinstance(size, int):
        return {"minItems": size, "maxItems": size}
    return {"minItems": spec.dims[size].min, "maxItems": spec.dims[size].max}


def _value(tensor: TensorSpec, answer: bool) -> Schema:
    """One element: the dtype's own range, and the declared one."""
    dtype = np.dtype(tensor.dtype)
    if dtype.kind == "b":
        return {"type": "boolean"}
    bounds: Schema = {}
    if tensor.low is not None:
        bounds["minimum"] = tensor.low
    if tensor.high is not None:
        bounds["maximum"] = tensor.high
    if dtype.kind != "f":
        whole = np.iinfo(dtype)
        return {"type": "integer", "minimum": int(whole.min), "maximum": int(whole.max), **bounds}
    if answer:
        return {"type": ["number", "null"]}
    limits = np.finfo(dtype)
    if dtype.itemsize == 8:
        return {"type": "number", "minimum": float(limits.min), "maximum": float(limits.max), **bounds}
    # What lies above the largest number by less than half a step is rounded to it.
    beyond = float(limits.max) + 2.0 ** (int(limits.maxexp) - int(limits.nmant) - 2)
    return {"type": "number", "exclusiveMinimum": -beyond, "exclusiveMaximum": beyond, **bounds}


def _tensors(tensors: Sequence[TensorSpec], spec: ModelSpec) -> Schema:
    return {
        "type": "array", "minItems": len(tensors), "maxItems": len(tensors),
        "items": {"anyOf": [_tensor(tensor, spec, False) for tensor in tensors]},
    }  # fmt: skip


def _tensor(tensor: TensorSpec, spec: ModelSpec, answer: bool) -> Schema:
    """One tensor of the Open Inference Protocol, its data flat or nested."""
    forms = [_array(tensor, spec, one, answer) for one in ((False, True) if spec.stackable else (False,))]
    flat = {"type": "array", "items": _value(tensor, answer)}
    size = {"type": "integer", "minimum": 0}
    return _object(
        {"name": {"const": tensor.name}, "datatype": {"const": DATATYPES[tensor.dtype]},
         "shape": {"type": "array", "items": size, "minItems": max(len(tensor.shape) - spec.stackable, 0),
                   "maxItems": len(tensor.shape)},
         "data": {"anyOf": [*forms, flat]}},
    )  # fmt: skip


def _asked(spec: ModelSpec) -> Schema:
    names = [tensor.name for tensor in spec.outputs]
    binary = _object({"binary_data": {"const": False}}, optional=("binary_data",))
    entry = _object({"name": {"enum": names}, "parameters": binary}, optional=("parameters",))
    return {"type": "array", "items": entry}


def _object(properties: Schema, optional: Sequence[str] = ()) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _words(spec: ModelSpec) -> str:
    """What the schemas leave to words."""
    inputs = "; ".join(map(str, spec.inputs))
    outputs = "; ".join(map(str, spec.outputs))
    dims = "; ".join(f"{name} {dim.min} to {dim.max}" for name, dim in spec.dims.items())
    batch = f" Without the axis {spec.batch} in all of them, arrays are one item." if spec.stackable else ""
    return (
        f"Inputs: {inputs}. Outputs: {outputs}.{f' Axes: {dims}.' if dims else ''}{batch} Beside what is listed, "
        f"{BINARY} takes any of the binary bodies, and with the header {HEADER_LENGTH} the Open Inference Protocol's "
        "binary tensors."
    )
