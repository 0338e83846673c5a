"""Dataclasses from plain mappings: what is read, and how what does not fit is named."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lockstep.config.mapping import from_mapping
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".0001", "'0.0001'"])
def test_a_number_may_be_written_in_any_usual_way(text: str) -> None:
    """YAML 1.1 takes 1e-4 for a string."""
    assert from_mapping(TrainConfig, yaml.safe_load(f"optim: {{lr: {text}}}"), "file").optim.lr == 1e-4


def test_a_whole_number_is_a_number_too() -> None:
    config = from_mapping(TrainConfig, {"optim": {"lr": 1, "lr_milestones": [3, 4]}, "augment": {"rotate": 15}}, "file")
    assert (config.optim.lr, config.optim.lr_milestones, config.augment.rotate) == (1.0, (3.0, 4.0), 15.0)
    assert isinstance(config.optim.lr, float)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epoch": 3}, "unknown field epoch; did you mean epochs?"),
        ({"optim": {"weight-decay": 0.1}}, "unknown field optim.weight-decay; did you mean optim.weight_decay?"),
        ({"optim": {"xyz": 1}}, "unknown field optim.xyz; must be one of optimizer, lr"),
        ({"lr": 0.1, "optim": {}}, "unknown field lr"),
        ({3: 4}, "unknown field 3"),
    ],
)
def test_an_unknown_field_names_the_nearest_and_the_file(values: dict[Any, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(TrainConfig, values, "mine.yaml")
    assert str(caught.value).startswith(f"mine.yaml: {words}")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epochs": "three"}, "epochs is 'three', but must be a whole number"),
        ({"epochs": 3.0}, "epochs is 3.0, but must be a whole number"),
        ({"epochs": True}, "epochs is True, but must be a whole number"),
        ({"epochs": None}, "epochs is None, but must be a whole number"),
        ({"max_steps": "all"}, "max_steps is 'all', but must be a whole number or null"),
        ({"optim": {"lr": "fast"}}, "optim.lr is 'fast', but must be a number"),
        ({"optim": {"lr": True}}, "optim.lr is True, but must be a number"),
        ({"optim": {"lr": [0.1]}}, "optim.lr is [0.1], but must be a number"),
        ({"optim": {"nesterov": "yes please"}}, "optim.nesterov is 'yes please', but must be true or false"),
        ({"optim": {"nesterov": 1}}, "optim.nesterov is 1, but must be true or false"),
        ({"optim": {"lr_milestones": 30}}, "optim.lr_milestones is 30, but must be a list of a number"),
        ({"optim": {"lr_milestones": [1, "x"]}}, "optim.lr_milestones is [1, 'x'], but must be a list of a number"),
        ({"optim": {"optimizer": "sdg"}}, "optim.optimizer is 'sdg', but must be 'sgd' or 'adam' or 'adamw'"),
        ({"data": {"loader_workers": "many"}}, "data.loader_workers is 'many', but must be a whole number or 'auto'"),
        ({"data": {"data_dir": 3}}, "data.data_dir is 3, but must be a path"),
        ({"model": {"arch": 18}}, "model.arch is 18, but must be a string"),
        ({"run": {"track": ["mlflow", "paper"]}}, "run.track is ['mlflow', 'paper'], but must be a list of"),
        ({"run": {"track": "mlflow"}}, "run.track is 'mlflow', but must be a list of"),
        ({"model": "resnet18"}, "model must be a mapping, not 'resnet18'"),
        ({"augment": {"zoom": 2}}, "--zoom 2: must be at least 0 and below 1"),
        ({"batch_size": 3, "global_batch_size": 4}, "--batch-size (per worker) and --global-batch-size contradict"),
    ],
)
def test_a_value_of_the_wrong_kind_names_the_field_and_the_file(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(TrainConfig, values, "mine.yaml")
    assert str(caught.value).startswith(f"mine.yaml: {words}")
