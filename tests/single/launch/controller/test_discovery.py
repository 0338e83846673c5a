"""A user's script that says how many slots there are."""

from __future__ import annotations

import time
from functools import partial

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.controller import discovery
from lockstep.launch.controller.discovery import Discovery, discover

pytestmark = pytest.mark.cold


def test_a_script_that_takes_too_long_ends_with_what_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SCRIPT_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"took longer than 0\.5 s"):
        Discovery(partial(discover, "sleep 30 & sleep 30", None))
    assert time.monotonic() - began < 10


def test_bytes_that_are_no_text_are_an_error_like_others() -> None:
    with pytest.raises(ConfigError, match="host:slots"):
        Discovery(partial(discover, r"printf '\377\n'", None))
