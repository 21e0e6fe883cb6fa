"""DPPO stopped and continued: the state of a run, and what may differ afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from point_dppo import SMALL, make_run

from algos.training.serialization import from_plain, to_plain


def test_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    config = replace(SMALL, actor_min_lr=1e-4, actor_lr_warmup=1, actor_lr_cycle=4, bc_weight=0.1)
    straight = make_run(config)
    straight.advance()
    torch.save(to_plain(straight.state_dict()), tmp_path / "state.pt")
    for _ in range(2):
        straight.advance()
    resumed = make_run(config, num_threads=2)
    resumed.load_state_dict(from_plain(torch.load(tmp_path / "state.pt", weights_only=True)))
    for _ in range(2):
        resumed.advance()
    assert resumed.progress == straight.progress
    for ours, theirs in (
        (resumed.policy.state_dict(), straight.policy.state_dict()),
        (resumed.learner.critic.state_dict(), straight.learner.critic.state_dict()),
    ):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    straight.close()
    resumed.close()


def test_state_dict_is_a_picture_of_its_moment() -> None:
    run = make_run()
    run.advance()
    state = run.state_dict()
    picture = repr(to_plain(state))
    run.advance()
    assert repr(to_plain(state)) == picture


def test_a_resumed_run_takes_the_weight_decay_it_is_given() -> None:
    first, second = make_run(), make_run(replace(SMALL, actor_weight_decay=0.1, critic_weight_decay=0.2))
    first.advance()
    second.load_state_dict(from_plain(to_plain(first.state_dict())))
    optimizers = (second.learner.actor_optimizer, second.learner.critic_optimizer)
    assert [optimizer.param_groups[0]["weight_decay"] for optimizer in optimizers] == [0.1, 0.2]
