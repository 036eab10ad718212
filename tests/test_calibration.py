"""Calibration data: every bad set refused before anything runs, every good one cut into legal batches, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from deployer.errors import SampleError
from deployer.quantize.calibration import Calibration, legal_cuts, make_calibration, read_calibration, rows_of
from deployer.spec import Array, Dim, ModelSpec, TensorSpec

IMAGES = ModelSpec(
    "images", (TensorSpec("input", "float32", ("batch", 3, 8, 8)),), dims={"batch": Dim(1, 4, 16)}, batch="batch"
)
TEXT = ModelSpec(
    "text",
    (TensorSpec("ids", "int64", ("batch", "length"), 0, 99), TensorSpec("mask", "int64", ("batch", "length"))),
    dims={"batch": Dim(1, 4, 16), "length": Dim(1, 8, 32)},
    batch="batch",
)
PLAIN = ModelSpec("plain", (TensorSpec("x", "float32", (3,)),))


def images(count: int) -> Array:
    return np.random.default_rng(0).random((count, 3, 8, 8), np.float32)


def calibrate(*sets: Any, spec: ModelSpec = IMAGES) -> Calibration:
    return make_calibration("data", iter(sets), spec)


# ------------------------------------------------------------------------------------------------------------ bad sets


def test_an_empty_set_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz")
    with pytest.raises(SampleError, match="holds no sample"):
        read_calibration("none.npz", IMAGES, tmp_path)
    with pytest.raises(SampleError, match="holds no sample"):
        calibrate()
    with pytest.raises(SampleError, match="holds no sample"):
        calibrate({"input": images(0)})


def test_one_sample_is_used_and_counted() -> None:
    found = calibrate({"input": images(1)})
    assert found.count == 1
    assert any("holds 1 sample;" in note for note in found.notes)
    assert found.held_out == ()


def test_31_samples_are_few_and_32_are_not() -> None:
    assert any("31 samples" in note and "fewer than 32" in note for note in calibrate({"input": images(31)}).notes)
    assert not any("fewer than" in note for note in calibrate({"input": images(32)}).notes)


def test_a_wrong_shape_in_the_middle_is_named_by_sample() -> None:
    good = images(1)
    with pytest.raises(SampleError, match=r"sample 4 of 'data'.*expected.*3, 8, 8.*got float32\[1, 8, 8, 3\]"):
        calibrate(*[{"input": good}] * 4, {"input": good.transpose(0, 2, 3, 1)})


def test_a_wrong_dtype_is_named() -> None:
    with pytest.raises(SampleError, match=r"sample 0 of 'data'.*wrong dtype.*float32.*uint8"):
        calibrate({"input": (images(16) * 255).astype(np.uint8)})


def test_all_zeros_are_refused() -> None:
    with pytest.raises(SampleError, match=r"one value: 'input' is 0\.0 throughout"):
        calibrate({"input": np.zeros_like(images(16))})


def test_one_image_again_and_again_is_said_to_be_one() -> None:
    assert any("all 40 samples are alike" in note for note in calibrate({"input": np.repeat(images(1), 40, 0)}).notes)


def test_samples_with_nan_or_infinity_are_named_by_index() -> None:
    data = images(40)
    data[7, 0, 0, 0], data[23, 1, 2, 3] = np.nan, np.inf
    with pytest.raises(SampleError, match="input 'input' of sample 7, 23;"):
        calibrate({"input": data[:20]}, {"input": data[20:]})


def test_a_constant_input_beside_one_that_varies_is_said() -> None:
    spec = ModelSpec(
        "two",
        (TensorSpec("x", "float32", ("batch", 2)), TensorSpec("gain", "float32", ("batch", 2))),
        dims={"batch": Dim(1, 4, 64)},
        batch="batch",
    )
    rows = np.arange(80, dtype=np.float32).reshape(40, 2)
    found = calibrate({"x": rows, "gain": np.ones_like(rows)}, spec=spec)
    assert any("'gain' is 1.0 throughout" in note for note in found.notes)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"inptu": images(2)}, "unknown input 'inptu'; did you mean 'input'"),
        ({}, "input 'input' is missing"),
        ([1, 2], "sample 0 of 'data' is a list"),
        ({"input": [[1, 2], [3]]}, "'input' is no array"),
    ],
    ids=["name", "missing", "list", "ragged"],
)
def test_what_is_no_sample_says_so(entry: Any, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        calibrate(entry)


def test_an_id_out_of_range_is_named_by_its_own_sample() -> None:
    ids = np.arange(60).reshape(6, 10)
    ids[4, 2] = 100
    with pytest.raises(SampleError, match=r"sample 7 of 'data'.*holds 100"):
        calibrate(
            {"ids": ids[:3] + 1, "mask": np.ones((3, 10), np.int64)},
            {"ids": ids, "mask": np.ones_like(ids)},
            spec=TEXT,
        )


@pytest.mark.parametrize("name", ["absent.npz", "data.txt", "broken.npz", "broken.safetensors"])
def test_unreadable_files_are_one_line(tmp_path: Path, name: str) -> None:
    if not name.startswith("absent"):
        (tmp_path / name).write_bytes(b"no archive")
    with pytest.raises(SampleError, match=name):
        read_calibration(name, IMAGES, tmp_path)


def test_a_function_that_fails_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "def bad():\n    yield {}['absent']\n\ndef number():\n    return 3\n\ndef endless():\n"
        "    import numpy as np\n    while True:\n        yield {'x': np.ones((60_000, 3), 'float32')}\n"
    )
    with pytest.raises(SampleError, match=r"bad' failed with KeyError"):
        read_calibration("data.py:bad", IMAGES, tmp_path)
    with pytest.raises(SampleError, match=r"number' failed with TypeError.*mappings"):
        read_calibration("data.py:number", IMAGES, tmp_path)
    with pytest.raises(SampleError, match="more than 100,000 samples"):
        read_calibration("data.py:endless", PLAIN, tmp_path)


# ----------------------------------------------------------------------------------------------------------- good sets


def test_every_source_reads_alike(tmp_path: Path) -> None:
    data = images(40)
    np.savez(tmp_path / "a.npz", input=data)
    np.save(tmp_path / "a.npy", data)
    save_file({"input": data}, tmp_path / "a.safetensors")
    (tmp_path / "a.py").write_text(
        "import numpy as np\n"
        "def whole():\n    return dict(np.load(__file__.replace('.py', '.npz')))\n"
        "def parts():\n    import torch\n    data = whole()['input']\n"
        "    for start in range(0, 40, 7):\n        yield {'input': torch.tensor(data[start:start + 7])}\n"
    )
    found = [read_calibration(name, IMAGES, tmp_path) for name in ("a.npz", "a.npy", "a.safetensors", "a.py:whole")]
    parts = read_calibration("a.py:parts", IMAGES, tmp_path)
    assert {one.count for one in (*found, parts)} == {40}
    assert len({one.sha256 for one in found}) == 1
    for one in (*found, parts):
        kept = np.concatenate([batch["input"] for batch in one.held_out])
        assert np.array_equal(kept, data[4::5])
        used = np.concatenate([batch["input"] for batch in one])
        assert np.array_equal(used, data[np.arange(40) % 5 != 4])
        assert all(rows_of(IMAGES, batch) <= 16 for batch in (*one.batches, *one.held_out))


def test_sentences_of_several_lengths() -> None:
    def sentences() -> Iterator[dict[str, Array]]:
        for length in range(1, 33):
            yield {"ids": np.arange(2 * length).reshape(2, length) % 99, "mask": np.ones((2, length), np.int64)}

    found = make_calibration("data", sentences(), TEXT)
    assert found.count == 64
    assert {batch["ids"].shape[1] for batch in (*found.batches, *found.held_out)} == set(range(1, 33))
    assert sum(rows_of(TEXT, batch) for batch in found.held_out) == 64 // 5


def test_a_model_without_a_batch_axis_takes_a_leading_axis_or_one_sample_a_mapping() -> None:
    rows = np.arange(120, dtype=np.float32).reshape(40, 3)
    stacked = calibrate({"x": rows}, spec=PLAIN)
    single = calibrate(*({"x": row} for row in rows), spec=PLAIN)
    assert stacked.count == single.count == 40
    assert stacked.sha256 == single.sha256
    assert len(stacked.held_out) == 8
    assert all(batch["x"].shape == (3,) for batch in stacked)


def test_the_hash_is_of_the_data() -> None:
    data = images(40)
    one = calibrate({"input": data}).sha256
    data[0, 0, 0, 0] += 1
    assert calibrate({"input": data}).sha256 != one


def test_a_fixed_batch_is_cut_into_whole_ones() -> None:
    spec = ModelSpec("four", (TensorSpec("x", "float32", ("n", 1)),), dims={"n": Dim(4, 4, 4)}, batch="n")
    found = calibrate({"x": np.arange(50, dtype=np.float32)[:, None]}, spec=spec)
    seen = [batch["x"].ravel().tolist() for batch in (*found.batches, *found.held_out)]
    assert all(len(rows) == 4 for rows in seen)
    assert {value for rows in seen for value in rows} == set(range(50))
    assert found.held_out
    with pytest.raises(SampleError, match="3 rows; the smallest 'n' is 4"):
        calibrate({"x": np.arange(3, dtype=np.float32)[:, None]}, spec=spec)


@given(rows=st.integers(1, 300), low=st.integers(1, 40), extra=st.integers(0, 40))
def test_cuts_are_legal_and_cover_every_row(rows: int, low: int, extra: int) -> None:
    high = low + extra
    if rows < low:
        with pytest.raises(ValueError, match="at least are needed"):
            legal_cuts(rows, low, high)
        return
    cuts = legal_cuts(rows, low, high)
    assert all(low <= len(cut) <= high for cut in cuts)
    assert sorted({row for cut in cuts for row in cut}) == list(range(rows))
    assert len(cuts) == -(-rows // high)
    disjoint = sum(map(len, cuts)) == rows
    assert disjoint or rows // len(cuts) < low


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), largest=st.integers(1, 20))
def test_no_sample_is_lost_or_seen_twice(sizes: list[int], largest: int) -> None:
    spec = ModelSpec("x", (TensorSpec("x", "float32", ("n", 1)),), dims={"n": Dim(1, 1, largest)}, batch="n")
    total = sum(sizes)
    values = np.arange(total, dtype=np.float32)[:, None]
    starts = np.cumsum([0, *sizes])
    sets = [{"x": values[start:stop]} for start, stop in pairwise(starts)]
    if total == 1:
        with pytest.raises(SampleError, match="one value"):
            make_calibration("data", iter(sets), spec)
        return
    found = make_calibration("data", iter(sets), spec)
    seen = [float(value) for batch in (*found.batches, *found.held_out) for value in batch["x"].ravel()]
    assert sorted(seen) == list(range(total))
    assert found.count == total
    assert all(batch["x"].shape[0] <= largest for batch in (*found.batches, *found.held_out))
    kept = sorted(float(value) for batch in found.held_out for value in batch["x"].ravel())
    assert kept == ([float(index) for index in range(4, total, 5)] if total - total // 5 >= 32 else [])
