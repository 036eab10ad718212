"""Folders and exported programs as sources: torch.distributed, Hugging Face, TorchScript, torch.export, ONNX."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from deployer.checkpoint import describe_model, import_checkpoint, load_checkpoint
from deployer.checkpoint.eager import run_eager
from deployer.checkpoint.hugging_face import BUILDER
from deployer.checkpoint.hugging_face import build as build_hugging_face
from deployer.checkpoint.sources import open_source, open_weights
from deployer.errors import CheckpointError, MachineError, ModelError
from deployer.export import current_bundle, export
from deployer.formats import Target
from deployer.inspection import inspect
from deployer.spec import Dim, ModelSpec, TensorSpec
from tests.test_intake_files import SAMPLES, SPEC, Net, Touch, answer, load

# torch.distributed checkpoints.


def save_dcp(folder: Path, tree: dict[str, Any]) -> Path:
    dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_distributed_checkpoint_of_one_process(tmp_path: Path) -> None:
    model = Net(2.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.eval()
    folder = save_dcp(
        tmp_path / "dcp",
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "ema": Net(3.0).state_dict()},
    )
    checkpoint = load(folder)
    np.testing.assert_array_equal(answer(checkpoint), answer(model))
    np.testing.assert_array_equal(answer(load(folder, weights="ema")), answer(Net(3.0)))
    assert checkpoint.intake is not None
    assert checkpoint.intake.kind == "torch.distributed checkpoint"
    assert inspect(folder, model=f"{Path(__file__).parent / 'test_intake_files.py'}:Net").coverage.fits  # type: ignore[union-attr]


FSDP2 = """
import sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
# 5 rows on 2 ranks: shards of unlike size
model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
full = {key: value.clone() for key, value in model.state_dict().items()}
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=sys.argv[1] + "/dcp")
if dist.get_rank() == 0:
    torch.save(full, sys.argv[1] + "/full.pt")
    torch.save(model.state_dict(), sys.argv[1] + "/rank.pt")
dist.barrier()
dist.destroy_process_group()
"""


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


INPUT_SPEC = ModelSpec("seq", (TensorSpec("input", "float32", ("batch", 4)),), dims={"batch": Dim()}, batch="batch")


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real FSDP2 job of two processes: its sharded checkpoint, the whole weights, and what one rank would save."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for attempt in (1, 2):  # on a loaded machine two processes sometimes fail to meet; not what is tested here
        folder = tmp_path_factory.mktemp("fsdp2")
        (folder / "job.py").write_text(FSDP2)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*command, folder / "job.py", folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode == 0:
            return folder
        print(f"attempt {attempt}: {done.stderr[-2000:]}")
    pytest.fail("torchrun failed twice; its own words are above")


def test_the_shards_of_fsdp2_are_joined_without_the_job(fsdp2: Path) -> None:
    assert len(list((fsdp2 / "dcp").glob("*.distcp"))) == 2
    samples = {"input": SAMPLES["x"]}
    checkpoint = load_checkpoint(fsdp2 / "dcp", model=f"{__file__}:sequential", spec=INPUT_SPEC, samples=samples)
    whole = load_checkpoint(fsdp2 / "full.pt", model=f"{__file__}:sequential", spec=INPUT_SPEC, samples=samples)
    one, other = (run_eager(item.build(), item.spec, samples)["output"] for item in (checkpoint, whole))
    np.testing.assert_array_equal(one, other)
    assert "torch.distributed.checkpoint" in sys.modules  # of this test; the reader itself imports nothing of it


def test_what_one_rank_of_fsdp2_saves_is_refused(fsdp2: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one rank's shards of distributed tensors.*full_state_dict=True"):
        open_source(fsdp2 / "rank.pt")


def test_metadata_runs_nothing(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "dcp", {"model": Net().state_dict()})
    marker = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Touch(marker)}))
    with pytest.raises(CheckpointError, match=r"truncated or corrupt: it names posix\.mkdir"):
        open_source(folder)
    assert not marker.exists()


def test_broken_distributed_checkpoints(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "dcp", {"model": Net().state_dict()})
    (shard,) = folder.glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"\.distcp' \(\d+ bytes\) is truncated or corrupt"):
        load(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"\.distcp' is missing.*copy the whole folder"):
        load(folder)
    shard.write_bytes(whole)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    with pytest.raises(CheckpointError, match=r"\.metadata' \(\d+ bytes\) is truncated or corrupt"):
        load(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no \.metadata: its save did not finish"):
        load(folder)


# Hugging Face folders.

IDS = {"input_ids": np.array([[2, 5, 6, 3], [2, 7, 3, 0]]), "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 1, 0]])}
IDS_SPEC = ModelSpec(
    "bert", tuple(TensorSpec(name, "int64", ("batch", "length")) for name in IDS),
    dims={"batch": Dim(), "length": Dim(1, 4, 16)}, batch="batch",
)  # fmt: skip


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models with random weights, as transformers writes them: `one` file, `shards`, and one with a tied head."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "shards", max_shard_size="8KB")
    transformers.BertForMaskedLM(config).eval().save_pretrained(folder / "tied")
    return folder


def expected(folder: Path, kind: str) -> dict[str, np.ndarray]:
    import transformers

    model = getattr(transformers, kind).from_pretrained(folder).eval()
    with torch.no_grad():
        outputs = model(**{name: torch.tensor(array) for name, array in IDS.items()})
    return {name: value.numpy() for name, value in outputs.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(("name", "kind"), [("one", "BertModel"), ("shards", "BertModel"), ("tied", "BertForMaskedLM")])
def test_a_hugging_face_folder_needs_no_model_code(hugging_face: Path, name: str, kind: str) -> None:
    folder = hugging_face / name
    assert (folder / "model.safetensors.index.json").exists() == (name == "shards")
    checkpoint = load_checkpoint(folder, spec=IDS_SPEC, samples=IDS)
    assert checkpoint.model == BUILDER
    answers = run_eager(checkpoint.build(), checkpoint.spec, IDS)
    for output, array in expected(folder, kind).items():
        np.testing.assert_array_equal(answers[output], array)


def test_a_hugging_face_model_imports_into_a_folder_that_needs_no_word(hugging_face: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(hugging_face / "tied", spec=IDS_SPEC, samples=IDS)
    folder = import_checkpoint(checkpoint, tmp_path / "ck")
    again = load_checkpoint(folder)
    for output, array in run_eager(checkpoint.build(), checkpoint.spec, IDS).items():
        np.testing.assert_array_equal(run_eager(again.build(), again.spec, IDS)[output], array)
    assert again.intake is not None
    assert again.intake.kind == "Hugging Face folder"
    assert len(load_file(folder / "model.safetensors")) < len(again.build().state_dict())  # the tied head, once


def test_a_model_of_ones_own_takes_the_weights_of_a_hugging_face_folder(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    state = Net().state_dict()
    save_file({key: state[key] for key in list(state)[:4]}, folder / "a.safetensors")
    save_file({key: state[key] for key in list(state)[4:]}, folder / "b.safetensors")
    index = {key: "a.safetensors" if place < 4 else "b.safetensors" for place, key in enumerate(state)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    np.testing.assert_array_equal(answer(load(folder)), answer(Net()))
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors' is missing"):
        load(folder)
    index["enc.bias"] = "../b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load(folder)


def test_code_of_a_hugging_face_folder_is_never_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "modeling_evil.py").write_text("open('ran', 'w').close()\n")
    config = {"architectures": ["EvilModel"], "auto_map": {"AutoModel": "modeling_evil.EvilModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference, arguments = describe_model(tmp_path) or ("", {})
    assert reference == BUILDER
    with pytest.raises(ModelError, match=r"no model 'EvilModel' \(it asks for code of its own"):
        build_hugging_face(**arguments)
    with pytest.raises(ModelError, match="no model 'AutoModel'"):  # only real models, no other names of transformers
        build_hugging_face("AutoModel", {})
    assert not (tmp_path / "ran").exists()


def test_without_transformers_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MachineError, match=r"pip install 'deployer\[hf\]'"):
        build_hugging_face("BertModel", {})


# Exported programs.


class WithScratch(Net):
    """With a buffer that is no part of the state."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__(fill)
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.scratch


def load_scratch(path: Path) -> Any:
    return load_checkpoint(path, model=f"{__file__}:WithScratch", args={"fill": 0.5}, spec=SPEC, samples=SAMPLES)


def test_a_torchscript_archive_gives_its_weights_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    torch.jit.trace(WithScratch().eval(), torch.ones(2, 4)).save(str(path))
    monkeypatch.delattr(torch.jit, "load")
    checkpoint = load_scratch(path)
    np.testing.assert_array_equal(answer(checkpoint), answer(WithScratch()))
    found = inspect(path)
    assert found.kind == "TorchScript archive"
    assert "enc.weight" in {tensor.name for tensor in found.tensors}


def test_a_frozen_torchscript_archive_has_no_names_left(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.freeze(torch.jit.script(Net().eval())).save(str(path))
    with pytest.raises(CheckpointError, match="frozen, not weights: freezing turned its weights into constants"):
        load(path)
    assert inspect(path).tensors


def test_a_torch_export_archive_gives_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(WithScratch().eval(), (torch.ones(2, 4),)), path)
    monkeypatch.delattr(torch.export, "load")
    np.testing.assert_array_equal(answer(load_scratch(path)), answer(WithScratch()))
    assert inspect(path).facts["inputs"] == "x"


def test_an_onnx_file_is_looked_at_and_refused_as_weights(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "model.onnx"
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [4, 3], [0.5] * 12)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 3])], [weight],
    )  # fmt: skip
    onnx.save(onnx.helper.make_model(graph), path)
    found = inspect(path)
    assert found.facts["inputs"] == "x: float[batch, 4]"
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in found.tensors] == [("w", "float32", (4, 3))]
    with pytest.raises(CheckpointError, match=r"ONNX file, not weights.*give the checkpoint that it was made from"):
        open_weights(path)


# The folder that import writes.

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(4, 3)
    def forward(self, x):
        return self.enc(x)
"""


def project(folder: Path) -> Path:
    (folder / "net.py").write_text(MODEL)
    np.savez(folder / "s.npz", **SAMPLES)
    torch.manual_seed(3)
    raw, ema = nn.Linear(4, 3).state_dict(), nn.Linear(4, 3).state_dict()
    torch.save(
        {
            "model": {f"module.enc.{key}": value for key, value in raw.items()},
            "ema": {f"enc.{key}": value for key, value in ema.items()},
        },
        folder / "w.pt",
    )
    return folder


def deployer(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deployer", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_import_then_export_on_the_command_line(tmp_path: Path) -> None:
    project(tmp_path)
    named = ("--model", "net.py:Net", "--samples", "s.npz")
    done = deployer("import", "w.pt", *named, "--weights", "ema", "-o", "ck", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote ck; next: deployer export ck" in done.stdout
    (tmp_path / "w.pt").unlink()
    done = deployer("export", "ck", "--format", "torchscript", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "build/net-torchscript-fp32/manifest.json").read_text())
    source = manifest["source"]
    assert source["weight_set"] == "ema"
    assert source["intake"]["path"] == "w.pt"
    assert source["intake"]["weight_sets"] == ["model", "ema"]
    assert source["intake"]["coverage"]["loaded"] == 2


def test_inspect_with_a_model_tells_of_every_key(tmp_path: Path) -> None:
    project(tmp_path)
    done = deployer("inspect", "w.pt", "--model", "net.py:Net", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["fits"] is True
    assert document["coverage"]["renamed"] == {"module.enc.weight": "enc.weight", "module.enc.bias": "enc.bias"}
    assert set(document["coverage"]["rules"].values()) == {"wrapper 'module.' removed"}
    assert [row["place"] for row in document["weight_sets"]] == ["model", "ema"]
    torch.save({"enc.wieght": torch.ones(3, 4)}, tmp_path / "bad.pt")
    done = deployer("inspect", "bad.pt", "--model", "net.py:Net", cwd=tmp_path)
    assert done.returncode == 2
    assert "nearest: enc.weight" in done.stdout
    assert "error: 'bad.pt' does not fit net.py:Net: missing: enc.bias, enc.weight" in done.stderr


def test_a_bundle_of_other_weights_of_the_same_file_is_not_reused(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"model": Net(1.0).state_dict(), "ema": Net(2.0).state_dict()}, path)
    target = Target("torchscript")
    export(load(path), target, tmp_path)
    assert current_bundle(load(path), target, tmp_path) is not None
    assert current_bundle(load(path, weights="ema"), target, tmp_path) is None


@pytest.mark.parametrize("how", ["truncated", "empty", "html"])
def test_a_broken_file_ends_with_2_and_writes_nothing(tmp_path: Path, how: str) -> None:
    project(tmp_path)
    whole = (tmp_path / "w.pt").read_bytes()
    content = {"truncated": whole[:600], "empty": b"", "html": b"<!doctype html><title>404</title>"}[how]
    (tmp_path / "w.pt").write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    done = deployer("import", "w.pt", "--model", "net.py:Net", "--samples", "s.npz", "-o", "out/ck", cwd=tmp_path)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert f"'w.pt' ({len(content)} bytes) is truncated or corrupt" in errors[0]
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


def test_a_model_file_with_siblings_is_refused(tmp_path: Path) -> None:
    project(tmp_path)
    (tmp_path / "layers.py").write_text("WIDTH = 3\n")
    (tmp_path / "net.py").write_text(f"from layers import WIDTH\n{MODEL}")
    model = f"{tmp_path / 'net.py'}:Net"
    checkpoint = load_checkpoint(tmp_path / "w.pt", model=model, spec=SPEC, samples=SAMPLES)
    with pytest.raises(ModelError, match="imports 'layers' from beside it"):
        import_checkpoint(checkpoint, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()
