from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.errors import RequestError, SampleError, SpecError
from deployer.samples import check_samples, read_samples, resize, sized_inputs
from deployer.spec import Dim, ModelSpec, TensorSpec, decode_spec

IDS = TensorSpec("ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("mask", "int64", ("batch", "sequence"))
ENCODER = ModelSpec(
    "encoder",
    (IDS, MASK),
    (TensorSpec("embedding", "float32", ("batch", 4)),),
    dims={"batch": Dim(1, 2, 8), "sequence": Dim(2, 4, 16)},
    batch="batch",
)


def arrays(batch: int, sequence: int, mask_sequence: int | None = None) -> dict[str, np.ndarray]:
    return {
        "ids": np.zeros((batch, sequence), np.int64),
        "mask": np.ones((batch, mask_sequence or sequence), np.int64),
    }


def test_dim_sizes_are_legal_sorted_and_include_the_ends() -> None:
    assert Dim(1, 8, 64).sizes() == [1, 2, 3, 7, 8, 64]
    assert Dim(3, 3, 3).sizes() == [3]
    assert Dim(4, 16, 128).sizes() == [4, 7, 16, 128]


@pytest.mark.parametrize(("low", "typical", "high"), [(0, 1, 2), (2, 1, 3), (1, 4, 3), (-1, 1, 1)])
def test_impossible_dims_are_refused(low: int, typical: int, high: int) -> None:
    with pytest.raises(SpecError, match="1 ≤ min ≤ typical ≤ max"):
        Dim(low, typical, high)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100))
def test_sizes_stay_in_range(low: int, more: int, still_more: int) -> None:
    dim = Dim(low, low + more, low + more + still_more)
    sizes = dim.sizes()
    assert sizes == sorted(set(sizes))
    assert sizes[0] == dim.min
    assert sizes[-1] == dim.max


def test_inputs_that_fit_give_the_sizes() -> None:
    assert ENCODER.check_inputs(arrays(3, 5)) == {"batch": 3, "sequence": 5}


@pytest.mark.parametrize(
    ("given_arrays", "field", "word"),
    [
        (arrays(9, 5), "ids", "allowed 1 to 8"),
        (arrays(1, 1), "ids", "allowed 2 to 16"),
        (arrays(2, 4, 5), "mask", "sequence=4"),
        ({"ids": np.zeros((1, 4), np.int64)}, "mask", "missing"),
        (arrays(1, 4) | {"masc": np.ones(1)}, "masc", "did you mean 'mask'"),
        (arrays(1, 4) | {"ids": np.zeros((1, 4), np.float32)}, "ids", "dtype"),
        (arrays(1, 4) | {"ids": np.zeros(4, np.int64)}, "ids", "number of axes"),
    ],
)
def test_inputs_that_do_not_fit_name_the_field(given_arrays: dict[str, np.ndarray], field: str, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        ENCODER.check_inputs(given_arrays)
    assert caught.value.field == field
    assert caught.value.expected
    assert caught.value.got


def test_a_batch_on_axis_one_is_legal() -> None:
    tensor = TensorSpec("x", "float32", (5, "batch", 3))
    spec = ModelSpec("m", (tensor,), (TensorSpec("y", "float32", (5, "batch", 6)),), {"batch": Dim()}, "batch")
    assert tensor.axis_of("batch") == 1
    assert spec.stackable


def test_an_output_without_the_batch_cannot_be_stacked() -> None:
    spec = msgspec.structs.replace(ENCODER, outputs=(TensorSpec("boxes", "float32", ("?", 5)),))
    assert not spec.stackable


@pytest.mark.parametrize(
    "change",
    [
        {"batch": "bach"},
        {"dims": {"batch": Dim()}},
        {"inputs": ()},
        {"inputs": (IDS, IDS)},
        {"name": "a/b"},
        {"name": ".."},
        {"version": "../1"},
        {"labels": ("a", "b")},
        {"dims": {"batch": Dim(), "sequence": Dim(), "unused": Dim()}},
    ],
)
def test_contradictory_specs_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        msgspec.structs.replace(ENCODER, **change)


def test_a_spec_survives_json_and_names_the_path_of_a_fault() -> None:
    data = msgspec.json.decode(msgspec.json.encode(ENCODER))
    assert decode_spec(data) == ENCODER
    data["inputs"][0]["shap"] = data["inputs"][0].pop("shape")
    with pytest.raises(SpecError, match=r"inputs\[0\]"):
        decode_spec(data)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 20))
def test_resize_takes_values_from_real_rows_only(rows: int, columns: int, size: int) -> None:
    array = np.arange(rows * columns).reshape(rows, columns)
    result = resize(array, 0, size, distinct=True)
    assert result.shape == (size, columns)
    for index, row in enumerate(result):
        assert row.tolist() == np.roll(array[index % rows], index // rows).tolist()


def test_sized_inputs_have_the_sizes_asked_for() -> None:
    samples = {"ids": np.arange(6).reshape(2, 3), "mask": np.ones((2, 3), np.int64)}
    result = sized_inputs(ENCODER, samples, {"batch": 5, "sequence": 7})
    assert {name: array.shape for name, array in result.items()} == {"ids": (5, 7), "mask": (5, 7)}
    assert result["ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert len({tuple(row) for row in result["ids"].tolist()}) == 5  # no two rows alike: a mix-up would show


def test_samples_are_read_from_every_kind_of_source(tmp_path, monkeypatch) -> None:
    good = arrays(2, 4)
    np.savez(tmp_path / "s.npz", **good)
    np.save(tmp_path / "s.npy", good["ids"])
    (tmp_path / "data.py").write_text(
        "import torch\ndef make():\n"
        "    return {'ids': torch.zeros(2, 4, dtype=torch.int64), 'mask': torch.ones(2, 4, dtype=torch.int64)}\n"
    )
    monkeypatch.chdir(tmp_path)
    for source in ("s.npz", "data.py:make"):
        named = check_samples(ENCODER, read_samples(source))
        assert {name: array.shape for name, array in named.items()} == {"ids": (2, 4), "mask": (2, 4)}
    assert list(read_samples("s.npy")) == [""]


def test_bad_samples_say_what_is_wrong(tmp_path) -> None:
    with pytest.raises(SampleError, match="no sample file"):
        read_samples(tmp_path / "absent.npz")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(SampleError, match="8 bytes"):
        read_samples(tmp_path / "cut.npz")
    (tmp_path / "data.txt").write_text("1,2")
    with pytest.raises(SampleError, match=r"\.npz"):
        read_samples(tmp_path / "data.txt")
    image = ModelSpec("m", (TensorSpec("x", "float32", (2,)),))
    with pytest.raises(SampleError, match=r"NaN or infinity at index \[1\]"):
        check_samples(image, {"x": np.array([0, np.nan], np.float32)})


def test_pickles_in_sample_files_are_not_run(tmp_path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SampleError, match="cannot be read"):
        read_samples(tmp_path / "evil.npy")


def test_inputs_that_cannot_fit_into_memory_name_the_axis() -> None:
    huge = msgspec.structs.replace(ENCODER, dims={"batch": Dim(1, 2, 10**11), "sequence": Dim(2, 4, 16)})
    with pytest.raises(SampleError, match="lower the max of 'batch'"):
        sized_inputs(huge, arrays(2, 4), {"batch": 10**11, "sequence": 4})


def test_samples_without_a_value_are_refused(tmp_path) -> None:
    np.save(tmp_path / "none.npy", np.zeros((0, 3), np.float32))
    with pytest.raises(SampleError, match=r"\[0, 3\] and holds no value"):
        read_samples(tmp_path / "none.npy")
