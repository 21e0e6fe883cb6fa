"""`burnish watch` where no window can be opened."""

from __future__ import annotations

import sys

import pytest
from messages import mentions

from burnish.commands.watch import WatchConfig, open_viewer, require_display, run
from burnish.config.overrides import RunContext
from policies.errors import CapabilityError, ConfigError

OLD = "tests/fixtures/version_0_1/policies/cloned"


@pytest.fixture(autouse=True)
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)


def test_without_a_display_the_command_for_moving_pictures_is_named(tmp_path) -> None:
    with pytest.raises(CapabilityError, match=mentions(f"display burnish eval policy={OLD} videos=3")):
        run(WatchConfig(policy=OLD), RunContext(tmp_path))


def test_a_policy_is_needed(tmp_path) -> None:
    with pytest.raises(ConfigError, match=mentions("policy=<run or policy directory>")):
        run(WatchConfig(), RunContext(tmp_path))


def test_a_display_that_refuses_is_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":no")
    require_display()
    with pytest.raises(CapabilityError, match=mentions("viewer does not open")):
        open_viewer(None, None)
