"""The recipes that come with Lockstep, and reading one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lockstep import recipes
from lockstep.config_mapping import from_mapping, to_mapping
from lockstep.data.catalog import NAMED
from lockstep.errors import ConfigError


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_loads_and_survives_being_written_and_read(name: str) -> None:
    recipe = recipes.load(name)
    text = yaml.safe_dump(to_mapping(recipe))
    assert from_mapping(yaml.safe_load(text), name) == recipe
    assert recipe.data.dataset in ("", *NAMED)
    assert recipe.model.arch


@pytest.mark.parametrize("name", NAMED)
def test_every_named_data_set_has_a_recipe_that_is_meant_for_it(name: str) -> None:
    recipe = recipes.load(recipes.for_source(name))
    assert recipe.data.dataset in ("", name, recipes.FOR_DATASET.get(name))


@pytest.mark.parametrize("source", ["my/photos", "package.module:load", "/data/cifar10", ""])
def test_the_users_own_data_has_the_folders_recipe(source: str) -> None:
    assert recipes.for_source(source) == "imagefolder"


def test_a_file_is_read_and_what_it_leaves_out_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("optim:\n  lr: 1e-4\n  lr_milestones: [3, 6.5]\nepochs: 3\n")
    recipe = recipes.load(str(path))
    assert (recipe.optim.lr, recipe.optim.lr_milestones, recipe.epochs) == (1e-4, (3.0, 6.5), 3)
    defaults = from_mapping({}, "nothing")
    assert (recipe.model, recipe.data) == (defaults.model, defaults.data)
    assert recipe.optim.momentum == defaults.optim.momentum
    path.write_text("# nothing but a comment\n")
    assert recipes.load(str(path)) == defaults


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optim: {lr: 0.1", "not YAML"),
        ("- epochs\n- 3\n", "the file must be a mapping"),
        ("epochs 3", "the file must be a mapping"),
        ("optim:\nepochs: 3\n", "optim must be a mapping"),
        ("optim: {lrr: 0.1}", "unknown field optim.lrr; did you mean optim.lr?"),
        ("!!python/object/apply:os.system [true]", "not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_the_files_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        recipes.load(str(path))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_an_unknown_recipe_names_the_nearest_or_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config cifar-10.*did you mean cifar10"):
        recipes.load("cifar-10")
    with pytest.raises(ConfigError, match=r"recipes are .*digits.*mnist"):
        recipes.load(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes("# Größe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: cannot be read"):
        recipes.load(str(tmp_path / "latin.yaml"))
