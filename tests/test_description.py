"""What a server says of a model: true of every request and answer, and held to it by generated ones over HTTP."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from deployer.bundle import read_bundle
from deployer.description import METADATA, OPENAPI, OPENAPI_TYPE, Routes, encode, model_metadata, openapi
from deployer.package import package
from deployer.package.mar import read_mar
from deployer.package.torchserve_worker import Guard, Limits
from deployer.predictor import Predictor, Request
from deployer.protocol import JSON, encode_request
from deployer.serve import Server
from deployer.spec import Dim, ModelSpec, TensorSpec
from tests.hostile import MODELS, arrays_of, predictor_of, wrong_requests
from tests.test_cli import assert_one_line_error, deployer

ROOT = Path(__file__).resolve().parent.parent
ROUTES = Routes(predict=("/p",), infer=("/i",), openapi=("/o",), metadata=("/m",))


def validator(spec: ModelSpec, name: str) -> Draft202012Validator:
    document = openapi(spec, ROUTES)
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})


# ------------------------------------------------------------------------------------------------------ the document


@pytest.mark.parametrize("model", MODELS)
def test_the_document_is_openapi(model: str) -> None:
    document = json.loads(encode(openapi(MODELS[model][0], ROUTES, max_request_bytes=7, hooks=True)))
    schema = schemathesis.openapi.from_dict(document)
    schema.validate()
    assert len(list(schema.get_all_operations())) == 4
    for name in document["components"]["schemas"]:
        Draft202012Validator.check_schema(document["components"]["schemas"][name])


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_right_requests_and_their_answers_are_of_the_schemas(model: str, data: st.DataObject) -> None:
    spec = MODELS[model][0]
    predictor = predictor_of(model)
    arrays = data.draw(arrays_of(spec))
    named = encode_request(arrays, JSON).body
    validator(spec, "Request").validate(json.loads(named))
    validator(spec, "Request").validate(json.loads(named)["inputs"])  # without the wrapper
    [answer] = predictor.answer([Request(named, JSON)])
    validator(spec, "Answer").validate(json.loads(answer.body))
    infer = encode_request(arrays, "oip").body
    validator(spec, "InferRequest").validate(json.loads(infer))
    [answer] = predictor.answer([Request(infer, JSON)])
    validator(spec, "InferAnswer").validate(json.loads(answer.body))


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_refusals_are_of_the_schema(model: str, data: st.DataObject) -> None:
    spec = MODELS[model][0]
    document = openapi(spec, ROUTES)
    [answer] = predictor_of(model).answer([data.draw(wrong_requests(spec))])
    assert str(answer.status) in document["paths"]["/p"]["post"]["responses"]
    if answer.status != 200:
        validator(spec, "Error").validate(json.loads(answer.body))


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("float32", 3.4028235e38, True), ("float32", 3.402823466385289e38, True), ("float32", 3.4028236e38, False),
        ("float32", -1e39, False), ("float16", 65519.0, True), ("float16", 65520.0, False), ("float64", 1.7e308, True),
        ("int8", 127, True), ("int8", 128, False), ("int8", 1.5, False), ("bool", 1, False), ("bool", True, True),
        ("uint8", -1, False), ("int64", 2**63 - 1, True), ("int64", 2**63, False),
    ],
)  # fmt: skip
def test_the_schema_takes_what_the_predictor_takes(dtype: str, value: Any, fits: bool) -> None:
    from deployer.formats import Loaded
    from deployer.runtime import Runner

    tensor = TensorSpec("x", dtype, (2,))
    spec = ModelSpec("m", (tensor,), (TensorSpec("y", dtype, (2,)),))
    runner = Runner(spec, Loaded(lambda arrays: {"y": arrays["x"]}, "echo"))
    body = json.dumps({"inputs": {"x": [value, value]}})
    [answer] = Predictor(runner, batch_independent=False).answer([Request(body.encode(), JSON)])
    assert (answer.status == 200) == fits
    assert validator(spec, "Request").is_valid(json.loads(body)) == fits


def test_declared_ranges_and_dims_are_in_the_schema() -> None:
    check = validator(MODELS["lookup"][0], "Request").is_valid
    assert check({"ids": [[0, 1, 9]]})
    assert not check({"ids": [[0, 1, 10]]})
    assert not check({"ids": [[0, 1]]})
    assert not check({"ids": [[0, 1, 2]] * 9})
    assert not check({"ids": []})
    assert not check({"idz": [[0, 1, 2]]})


def test_refusals_of_overload_and_of_a_model_that_hangs_are_in_the_document() -> None:
    limits = Limits(batch_size=4, workers=1, max_queue_wait_s=1, response_timeout_s=60)
    guard = Guard(predictor_of("lookup"), limits, {})
    responses = openapi(MODELS["lookup"][0], ROUTES)["paths"]["/p"]["post"]["responses"]
    for response in (guard._refusal(3), guard._timeout()):
        told = responses[str(response.status)]
        assert set(response.headers) <= set(told.get("headers", ()))
        validator(MODELS["lookup"][0], "Error").validate(json.loads(response.body))
    assert Draft202012Validator(responses["503"]["headers"]["Retry-After"]["schema"]).is_valid(3)


def test_metadata_has_minus_one_for_what_is_not_fixed() -> None:
    spec = ModelSpec(
        "m", (TensorSpec("x", "float16", ("b", 3)),), (TensorSpec("y", "int64", ("b", "?")),), {"b": Dim(1, 2, 3)}, "b"
    )
    assert model_metadata(spec, "deployer_onnx") == {
        "name": "m",
        "versions": ["1.0"],
        "platform": "deployer_onnx",
        "inputs": [{"name": "x", "datatype": "FP16", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1, -1]}],
    }
    validator(spec, "ModelMetadata").validate(model_metadata(spec, "x"))


def test_a_predictor_without_a_document_says_what_it_has() -> None:
    predictor = predictor_of("lookup")
    [metadata, absent, other] = predictor.answer(
        [Request(b"", describe=what) for what in (METADATA, OPENAPI, "x" * 99)]
    )
    assert (metadata.status, json.loads(metadata.body)["platform"]) == (200, "deployer")
    assert (absent.status, other.status) == (404, 404)
    assert json.loads(absent.body)["error"]["expected"] == METADATA
    assert len(json.loads(other.body)["error"]["got"]) == 40


# -------------------------------------------------------------------------------------------------- the real server


@pytest.fixture(scope="module")
def archive(digits_bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(digits_bundles["onnx"], output=tmp_path_factory.mktemp("store"), workers=1)


@pytest.fixture(scope="module")
def server(archive: Path) -> Iterator[Server]:
    with Server([archive], port=0, management_port=0, metrics_port=0) as running:
        yield running


def get(server: Server, path: str) -> httpx.Response:
    owner = {"Authorization": f"Bearer {server.token}"}
    return httpx.get(server.inference_url + path, headers=owner, timeout=60, trust_env=False)


def test_the_server_publishes_what_the_archive_holds(server: Server, archive: Path) -> None:
    answer = get(server, "/predictions/digits/1.0/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, OPENAPI_TYPE)
    assert answer.content == read_mar(archive).read("openapi.json")
    document = answer.json()
    assert set(document["paths"]) == {
        "/predictions/digits", "/predictions/digits/1.0", "/v2/models/digits/infer",
        "/predictions/digits/1.0/openapi.json", "/predictions/digits/1.0/metadata",
    }  # fmt: skip
    metadata = get(server, "/predictions/digits/1.0/metadata")
    assert metadata.json()["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert get(server, "/predictions/digits/1.0/nothing").status_code == 404
    assert httpx.get(f"{server.inference_url}/predictions/digits/1.0/metadata", trust_env=False).status_code == 400


def test_inspect_prints_it(archive: Path, digits_bundles: Mapping[str, Path]) -> None:
    done = deployer("inspect", archive, "--openapi")
    assert done.stdout.encode() == read_mar(archive).read("openapi.json")
    assert_one_line_error(deployer("inspect", digits_bundles["onnx"], "--openapi"), 2, "--openapi is for a .mar")


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_http", ROOT / "scripts/fuzz_http.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_requests_are_answered_as_the_document_says(
    server: Server, fuzz: ModuleType, digits_bundles: Mapping[str, Path]
) -> None:
    """schemathesis on the published document, through Java: no 5xx, every answer of its schema."""
    url = server.endpoints[0].url
    done = fuzz.run(url, server.token, digits_bundles["onnx"], max_examples=40, seed=0, phases="fuzzing")
    for code, output in done:
        assert code == 0, output
        made = re.search(r"(\d+) generated, (\d+) passed", output)
        assert made, output
        assert int(made[1]) >= 40


def test_the_fuzzing_finds_a_document_that_is_wrong(
    server: Server, fuzz: ModuleType, digits_bundles: Mapping[str, Path], tmp_path: Path
) -> None:
    """The same run with a document that promises other answers fails: the check can."""
    spec = read_bundle(digits_bundles["onnx"]).spec
    lie = openapi(
        ModelSpec(spec.name, spec.inputs, (TensorSpec("digit", "int64", ("batch",)),), spec.dims, spec.batch),
        Routes(predict=("/predictions/digits",), infer=("/v2/models/digits/infer",)),
    )
    (tmp_path / "openapi.json").write_bytes(encode(lie))
    [(code, output), _] = fuzz.run(
        server.endpoints[0].url, server.token, digits_bundles["onnx"], max_examples=5, seed=0, phases="fuzzing",
        document=tmp_path / "openapi.json",
    )  # fmt: skip
    assert code == 1
    assert "Response violates schema" in output


def test_answers_with_nan_are_of_the_schema(server: Server) -> None:
    body = encode_request({"image": np.full((1, 8, 8), 3e38, np.float32)}, JSON).body
    owner = {"Authorization": f"Bearer {server.token}", "Content-Type": JSON}
    answer = httpx.post(server.endpoints[0].url, content=body, headers=owner, timeout=60, trust_env=False)
    document = get(server, "/predictions/digits/1.0/openapi.json").json()
    schema = {"$ref": "#/components/schemas/Answer", "components": document["components"]}
    Draft202012Validator(schema).validate(answer.json())
