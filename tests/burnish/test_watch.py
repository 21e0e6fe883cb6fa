"""`burnish watch` where no window can be opened."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from messages import mentions

from burnish.commands.watch import WatchConfig, open_viewer, require_display, run
from burnish.config.overrides import RunContext
from burnish.config.schema import compose_config
from envs.rollouts.episodes import EpisodeRow
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
    """MuJoCo's viewer alone ends the process there."""
    monkeypatch.setenv("DISPLAY", ":no")
    with pytest.raises(CapabilityError, match=mentions("DISPLAY=:no does not open")):
        require_display()
    with pytest.raises(CapabilityError, match=mentions("viewer does not open")):
        open_viewer(None, None)


def test_an_episode_has_an_end_to_name_where_the_task_knows_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    def play(policy: Any, env: Any, *, on_episode: Any, **_: Any) -> None:
        on_episode(EpisodeRow(7, 0, 1.5, 9, False, False, True))

    monkeypatch.setattr("burnish.commands.watch.require_display", lambda: None)
    monkeypatch.setattr("burnish.commands.watch.watch", play)
    run(WatchConfig(policy=OLD), RunContext(tmp_path))
    other = [f"policy={OLD}", "env=gym", "env.id=Reacher-v5", "allow_other_task=true"]
    run(compose_config("watch", other), RunContext(tmp_path))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("seed 7: 9 steps, return 1.5, no success") and second.endswith("return 1.5")
