"""Values of a configuration: files of them, references, sizes and time limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from lockstep.config.mapping import from_mapping
from lockstep.config.schema import TrainConfig
from lockstep.config.values import TimeLeft, parse_size, parse_time_limit, resolve
from lockstep.errors import ConfigError
from lockstep.train.fit import configure


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
def test_a_wrong_field_or_value_is_named_with_the_file(values: dict[Any, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(TrainConfig, values, "mine.yaml")
    assert str(caught.value).startswith(f"mine.yaml: {words}")


NewModule = Callable[[str, str], None]


def test_a_module_in_the_current_folder_is_found(new_module: NewModule) -> None:
    new_module("lockstep_test_nets", "def build(): return 'built'\nclass Net:\n    size = 3\n")
    new_module("lockstep_test_package.nets", "def build(): return 'nested'\n")
    assert resolve("--model", "lockstep_test_nets:build")() == "built"
    assert resolve("--model", "lockstep_test_nets:Net")().size == 3
    assert resolve("--model", "lockstep_test_package.nets:build")() == "nested"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_such_module_here:build", "no module 'no_such_module_here'"),
        ("no_such_package.nets:build", "no module 'no_such_package'"),
        ("json.nothing:build", "no module 'json.nothing'"),
        ("json:nothing", "has no function 'nothing'"),
        ("json:__name__", "has no function '__name__'"),
        ("json:", "must be MODULE:FUNCTION"),
        ("time:nothing", "has no function 'nothing'"),  # a module without a file
        (":build", "must be MODULE:FUNCTION"),
    ],
)
def test_what_is_not_there_is_named_with_its_flag(reference: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("--model", reference)
    assert str(caught.value).startswith(f"--model {reference}")
    assert words in str(caught.value)


def test_what_the_users_module_lacks_itself_is_not_hidden(new_module: NewModule) -> None:
    """Its own missing import keeps its traceback, also where one name starts with the other."""
    new_module("lockstep_test_broken", "import lockstep_test\ndef build(): pass\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'lockstep_test'"):
        resolve("--model", "lockstep_test_broken:build")
    new_module("lockstep_test_wrong", "raise RuntimeError('on purpose')\n")
    with pytest.raises(RuntimeError, match="on purpose"):
        resolve("--model", "lockstep_test_wrong:build")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1K", 1024),
        ("64KiB", 65536),
        ("1.5GB", 1_500_000_000),
        ("2 MiB", 2 << 20),
        ("1kB", 1000),
        ("3m", 3 << 20),
        ("512B", 512),
    ],
)
def test_units_are_those_of_the_field(text: str, size: int) -> None:
    assert parse_size(text, "--size") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "1 XB", "0.1", "1e9", "nan"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--size .*: must be a size such as"):
        parse_size(text, "--size")


MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * MINUTE),
        ("0:20", 20),
        ("90:05", 90 * MINUTE + 5),
        ("1:30:00", 1.5 * HOUR),
        ("100:00:01", 100 * HOUR + 1),
        ("2-0", 2 * DAY),
        ("2-12", 2 * DAY + 12 * HOUR),
        ("1-02:03", DAY + 2 * HOUR + 3 * MINUTE),
        ("1-02:03:04", DAY + 2 * HOUR + 3 * MINUTE + 4),
        *((word, None) for word in ("none", "0", "0:00", "UNLIMITED")),
    ],
)
def test_slurms_forms_are_understood(text: str, seconds: float | None) -> None:
    assert parse_time_limit(text) == seconds
    assert configure(time_limit=text).run.time_limit == text


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "1h", "1:60", "1:60:00", "2-", "2-1:2:3:4", "1:2:3:4", "²", "INVALID"]
)
def test_another_form_is_refused_and_the_forms_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--time-limit .* DAYS-HOURS\[:MINUTES\[:SECONDS\]\], or none"):
        configure(time_limit=text)


def test_time_left_is_reported_with_its_source() -> None:
    assert TimeLeft(7261.6, "PBS_WALLTIME").describe() == "time limit: 2:01:02 left (PBS_WALLTIME)"
