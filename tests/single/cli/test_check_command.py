"""The arguments of `lockstep check`."""

from __future__ import annotations

import pytest

from lockstep.cli.check import main
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing COMMAND"),
        (["-np", "1", "--", "python"], "-np 1: must be at least 2"),
        (["--invariance", "3", "--", "python", "{batch}"], "--invariance 3: must be a multiple of 2 workers"),
        (["--json", "--steps", "0", "--", "python"], "--steps 0: must be at least 1"),
        (["--invariance", "4", "--", "python"], "--invariance needs {batch} in the command"),
        (["--", "python", "-b{batch}"], "{batch} in the command needs --invariance N"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        main(arguments)
    assert message in str(error.value)
