from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from deployer.errors import DeployerError, SpecError, UsageError
from deployer.recipe import Recipe, find_recipe, load_described, read_recipe, write_recipe
from deployer.references import load_reference
from deployer.spec import Dim, TensorSpec

MODEL = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.table = nn.Embedding(10, size)
    def forward(self, ids, weight):
        return {"embedding": (self.table(ids) * weight[..., None]).sum(1)}

def build(size=4):
    torch.manual_seed(0)
    return Encoder(size)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: model file, weights, samples; the working folder is elsewhere below it."""
    (tmp_path / "model.py").write_text(MODEL)
    torch.save(load_reference(f"{tmp_path}/model.py:build")().state_dict(), tmp_path / "w.pt")
    np.savez(tmp_path / "s.npz", ids=np.arange(12).reshape(2, 6) % 10, weight=np.ones((2, 6), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_a_recipe_that_reads_back_and_loads(project: Path) -> None:
    target = project / "deploy" / "deployer.yaml"
    target.parent.mkdir()
    spec, notes = write_recipe(
        target, model="model.py:build", samples="s.npz", args={"size": 4}, checkpoint="w.pt", name="encoder"
    )
    assert notes == []
    recipe = read_recipe(target)
    assert recipe.spec() == spec
    assert spec.dims == {"batch": Dim(1, 8, 64), "sequence": Dim(1, 6, 6)}
    assert spec.outputs == (TensorSpec("embedding", "float32", ("batch", 4)),)
    assert recipe.model == "../model.py:build"  # as seen from the recipe, not from where init ran
    text = target.read_text()
    assert text.count("#") > 6
    checkpoint = load_described(recipe, target.parent)
    assert checkpoint.spec == spec
    assert checkpoint.state is not None


def test_init_does_not_overwrite_unless_told(project: Path) -> None:
    target = project / "deployer.yaml"
    target.write_text("name: mine\n")
    with pytest.raises(UsageError, match="--force"):
        write_recipe(target, model="model.py:build", samples="s.npz", args={}, checkpoint=None, name=None)
    assert target.read_text() == "name: mine\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: a.py:b\n", "unknown key 'modle'; did you mean 'model'"),
        ("export: {formts: [onnx]}\n", "export: unknown key 'formts'; did you mean 'formats'"),
        ("dims: {batch: {max: many}}\n", r"\$\.dims"),
        ("- a\n- b\n", "holds a list"),
        ("name: [unclosed\n", "is not YAML"),
        ("name: a\nname: b\n", "'name' stands twice, again in line 2"),
        ("args: &a {x: *a}\n", "contains itself"),
        ("schema_version: 9\n", "schema_version 9"),
        ("dims: {batch: {min: 0}}\n", "1 ≤ min"),
    ],
)
def test_a_wrong_recipe_is_one_line_with_file_and_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "deployer.yaml"
    path.write_text(text)
    with pytest.raises(DeployerError, match=message) as caught:
        read_recipe(path)
    assert "\n" not in str(caught.value)


def test_inputs_without_a_name_are_refused() -> None:
    with pytest.raises(SpecError, match="add `name:`"):
        Recipe(inputs=yaml.safe_load("{}") or {"x": {"dtype": "float32", "shape": [1]}}).spec()


def test_no_recipe_is_an_empty_one_unless_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(None) == (Recipe(), None)
    with pytest.raises(UsageError, match="deployer init"):
        find_recipe(tmp_path / "absent.yaml")


def test_flags_win_over_the_recipe(project: Path) -> None:
    write_recipe(
        project / "deployer.yaml", model="model.py:build", samples="s.npz", args={}, checkpoint="w.pt", name="encoder"
    )
    recipe, folder = find_recipe(None)
    torch.save(load_reference("model.py:build")(size=4).state_dict(), project / "other.pt")
    checkpoint = load_described(recipe, folder, project / "other.pt", name="renamed")
    assert checkpoint.source.endswith("other.pt")
    assert checkpoint.spec.name == "renamed"


def test_without_a_recipe_the_spec_is_probed(project: Path) -> None:
    checkpoint = load_described(Recipe(), None, project / "w.pt", model="model.py:build", samples="s.npz")
    assert checkpoint.spec.name == "model"
    assert checkpoint.spec.batch == "batch"


def test_a_self_describing_folder_is_not_mixed_with_a_recipe(digits_folder: Path, caplog) -> None:
    recipe = Recipe(name="other", model="absent.py:build")
    checkpoint = load_described(recipe, Path(), digits_folder)
    assert checkpoint.spec.name == "digits"
