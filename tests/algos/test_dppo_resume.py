"""DPPO stopped and continued: the state of a run, and what may differ afterwards."""

from __future__ import annotations

from dataclasses import replace

from point_dppo import SMALL, make_run

from algos.training.serialization import from_plain, to_plain


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
