"""The recipes that come with Lockstep, and reading one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lockstep.cli.parse import parse_train
from lockstep.config import recipes
from lockstep.config.mapping import from_mapping, to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.data.catalog import NAMED
from lockstep.errors import ConfigError


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_loads_and_survives_being_written_and_read(name: str) -> None:
    recipe = recipes.load(name)
    text = yaml.safe_dump(to_mapping(recipe))
    assert from_mapping(TrainConfig, yaml.safe_load(text), name) == recipe
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
    defaults = from_mapping(TrainConfig, {}, "nothing")
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
        (f"optim: {{lr: 1{'0' * 400}}}", "an integer of more than 64 bits: 1000"),
        # Of a network, whichever is chosen
        ("for_arch: [alexnet]", "for_arch must be a mapping"),
        ("for_arch: {alexnet: 3}", "for_arch.alexnet: the file must be a mapping"),
        ("for_arch: {alexnet: {optim: {lrr: 1}}}", "for_arch.alexnet: unknown field optim.lrr; did you mean optim.lr?"),
        ("for_arch: {alexnet: {optim: {lr: 0}}}", "--lr 0: must be above 0"),
    ],
)
def test_error_in_a_file_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        recipes.load(str(path))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


VGG = {  # this vgg16 has batch norm for small images
    "my/photos -a vgg16 --image-size 64": 0.1,
    "cifar10 -a vgg16": 0.1,
    "my/photos -a vgg16 --image-size 65": 0.01,
    "synthetic -a vgg16": 0.01,
    "my/photos -a torchvision/vgg16 --image-size 64": 0.01,
    "my/photos -a vgg11 --image-size 64": 0.01,  # there is torchvision's only
}
WITHOUT_NORM = ["alexnet", "vgg11", "vgg13", "vgg16", "vgg19", "squeezenet1_0", "squeezenet1_1"]


@pytest.mark.parametrize("arch", [*WITHOUT_NORM, "torchvision/alexnet", "torchvision/vgg16"])
@pytest.mark.parametrize("words", [["imagenet"], ["my/photos"], ["my/photos", "--config", "imagenet"]])
def test_networks_without_batch_norm_have_a_lower_default_rate(arch: str, words: list[str]) -> None:
    job = parse_train([*words, "-a", arch]).job
    assert (job.optim.lr, job.model.arch, job.epochs) == (0.01, arch, 90)
    assert parse_train([*words, "-a", arch, "--lr", "0.1"]).job.optim.lr == 0.1  # the recipe's own for the others


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        *((words, 0.1) for words in ("imagenet", "imagenet -a vgg16_bn", "cifar10 -a vgg16", "cifar10 -a alexnet")),
        *(
            (f"{words} --config {recipe}", rate)
            for recipe in ("imagefolder", "imagenet")
            for words, rate in VGG.items()
        ),
    ],
)
def test_networks_with_batch_norm_have_the_recipes_rate(words: str, rate: float) -> None:
    assert parse_train(words.split()).job.optim.lr == rate


def test_the_outcome_for_a_network_can_be_written_and_read_back(tmp_path: Path) -> None:
    assert parse_train(["imagenet", "-a", "vgg11", "--lr", "0.3"]).job.optim.lr == 0.3
    outcome = parse_train(["imagenet", "-a", "vgg11"]).job
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(to_mapping(outcome)))
    assert parse_train(["--config", str(path)]).job == outcome
    assert parse_train(["--config", str(path), "-a", "resnet50"]).job.optim.lr == 0.01  # a file's rate is its own


def test_a_flag_may_need_another_that_the_recipe_sets(tmp_path: Path) -> None:
    assert parse_train(["imagenet", "--flip-alternate"]).job.augment.flip_alternate
    path = tmp_path / "mine.yaml"
    path.write_text("numerics: {precision: O2}\nbatch_size: 8\ndata: {dataset: mnist}\n")
    for words in (["--config", str(path)], [f"--config={path}"]):
        job = parse_train([*words, "--loss-scale", "64"]).job
        assert (job.numerics.loss_scale, job.batch_size, job.data.source) == (64.0, 8, "mnist")
        assert parse_train([*words, "--global-batch-size", "64"]).job.batch_size is None
    with pytest.raises(ConfigError, match="--flip-alternate"):
        parse_train(["digits", "--flip-alternate"])  # whose recipe has no --flip


def test_a_files_own_network_may_have_fields_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = "model: {arch: a}\noptim: {lr: 0.5, momentum: 0.8}\nfor_arch:\n  a: {optim: {lr: 0.25}}\n  b: {epochs: 3}\n"
    path.write_text(text)
    own, other, third = (recipes.load(str(path), arch) for arch in (None, "b", "c"))
    assert (own.optim.lr, own.optim.momentum) == (0.25, 0.8)
    assert (other.optim.lr, other.epochs) == (0.5, 3)
    assert (third.optim.lr, third.epochs) == (0.5, 10)


def test_an_unknown_recipe_names_the_nearest_or_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config cifar-10.*did you mean cifar10"):
        recipes.load("cifar-10")
    with pytest.raises(ConfigError, match=r"available recipes: .*digits.*mnist"):
        recipes.load(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes("# Größe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: cannot be read"):
        recipes.load(str(tmp_path / "latin.yaml"))
