"""The ring of transitions, what its rewards are worth, and batches from two sources."""

from __future__ import annotations

import pytest
import torch
from messages import mentions
from small_tables import single_steps
from torch import Tensor

from algos.offpolicy.replay_buffer import Discounting, Mixture, Replay
from algos.transitions import TransitionTable
from policies.errors import CheckpointError

C, L, A, STEPS = 3, 2, 4, 2


def ring(capacity: int = 5) -> Replay:
    return Replay(capacity, cond=C, latent=L, action=A, steps=STEPS)


def rows(first: int, n: int) -> dict[str, Tensor]:
    """Return transitions that are recognised by the number in every entry."""
    number = torch.arange(first, first + n).float()
    wide = {name: number[:, None].expand(n, width) for name, width in
            (("cond", C), ("latent", L), ("action", A), ("rewards", STEPS), ("next_cond", C))}  # fmt: skip
    flags = torch.zeros(n, dtype=torch.bool)
    return wide | {"length": torch.full((n,), STEPS), "terminated": flags, "truncated": flags}


def held(replay: Replay) -> list[int]:
    batch = replay.gather(torch.arange(len(replay)), Discounting())
    return sorted(int(x) for x in batch.cond[:, 0])


def test_the_ring_keeps_the_latest_rows() -> None:
    replay = ring()
    replay.add(**rows(0, 3))
    assert held(replay) == [0, 1, 2]
    replay.add(**rows(3, 4))
    assert held(replay) == [2, 3, 4, 5, 6] and len(replay) == 5
    replay.add(**rows(7, 12))
    assert held(replay) == [14, 15, 16, 17, 18]


def test_every_part_of_a_row_comes_back() -> None:
    replay, generator = ring(), torch.Generator().manual_seed(0)
    wide = {name: torch.randn(2, width, generator=generator) for name, width in
            (("cond", C), ("latent", L), ("action", A), ("rewards", STEPS), ("next_cond", C))}  # fmt: skip
    ends = {"terminated": torch.tensor([True, False]), "truncated": torch.tensor([False, True])}
    replay.add(**wide, length=torch.tensor([1, 2]), **ends)
    batch = replay.gather(torch.tensor([0, 1]), Discounting(gamma=0.5))
    for name in ("cond", "latent", "action", "next_cond"):
        assert torch.equal(getattr(batch, name), wide[name])
    r = wide["rewards"]
    assert torch.equal(batch.reward, torch.stack([r[0, 0], r[1, 0] + 0.5 * r[1, 1]]))
    assert batch.discount.tolist() == [0.0, 0.25]


def table(n: int) -> TransitionTable:
    ones = torch.full((n, 1), -1.0)
    return TransitionTable([single_steps(ones.expand(n, C), ones.expand(n, A), outcome=-1.0)], n)


def test_a_share_of_every_batch_comes_from_the_dataset() -> None:
    replay, generator = ring(), torch.Generator().manual_seed(0)
    replay.add(**rows(0, 5))
    batch = Mixture(replay, Discounting(), table(7), 0.3).draw(10, generator)
    assert len(batch) == 10 and (batch.cond[:, 0] < 0).tolist() == [False] * 7 + [True] * 3
    assert (batch.reward[7:] == -1).all() and not batch.latent[7:].any()
    assert (Mixture(replay, Discounting(), None, 0.3).draw(10, generator).cond >= 0).all()


def test_an_offset_moves_every_value_by_itself() -> None:
    """Whatever follows is worth, a transition is worth the offset more; one that ends the task, too."""
    replay = ring()
    replay.add(**rows(0, 3))
    plain, raised = (Mixture(replay, Discounting(gamma=0.9), table(7), 0.5, offset) for offset in (0.0, 2.0))
    one, other = (source.draw(20, torch.Generator().manual_seed(1)) for source in (plain, raised))
    later = torch.randn(20, generator=torch.Generator().manual_seed(2))
    before, after = one.reward + one.discount * later, other.reward + other.discount * (later + 2.0)
    torch.testing.assert_close(after, before + 2.0)
    assert torch.equal(one.cond, other.cond) and one.discount.unique().numel() > 1


def test_drawing_covers_all_rows_and_follows_from_the_generator() -> None:
    replay = ring(64)
    replay.add(**rows(0, 40))
    one, other = (replay.draw(2000, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, other) and torch.equal(one.unique(), torch.arange(40))
    replay.add(**rows(40, 50))  # around the end of the ring
    drawn = replay.gather(replay.draw(4000, torch.Generator().manual_seed(1)), Discounting())
    assert torch.equal(drawn.cond[:, 0].unique(), torch.arange(26.0, 90.0))


def test_a_saved_ring_continues_with_the_same_rows() -> None:
    first, second = ring(), ring()
    first.add(**rows(0, 7))
    second.load_state_dict(first.state_dict())
    for replay in (first, second):
        replay.add(**rows(7, 2))
    everything = torch.arange(5)
    one, other = (replay.gather(everything, Discounting()) for replay in (first, second))
    assert torch.equal(one.cond, other.cond) and torch.equal(one.reward, other.reward)


def test_a_saved_ring_continues_in_a_larger_one_and_not_where_there_is_no_place() -> None:
    saved = ring()
    saved.add(**rows(0, 7))  # 2 ... 6, written around the end
    larger = ring(6)
    larger.load_state_dict(saved.state_dict())
    assert held(larger) == [2, 3, 4, 5, 6]
    larger.add(**rows(7, 1))
    assert held(larger) == [2, 3, 4, 5, 6, 7]
    larger.add(**rows(8, 2))
    assert held(larger) == [4, 5, 6, 7, 8, 9]  # the oldest go first
    with pytest.raises(CheckpointError, match=mentions("algo.buffer_size 5 4")):
        ring(4).load_state_dict(saved.state_dict())
    wider = Replay(5, cond=C + 1, latent=L, action=A, steps=STEPS)
    with pytest.raises(CheckpointError, match=mentions("algo.buffer_size")):
        wider.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("compat", [False, True])
def test_every_way_to_end_is_worth_what_a_loop_over_steps_says(compat: bool) -> None:
    """All lengths, ended by the task, by the clock, by both, or not at all."""
    generator, steps = torch.Generator().manual_seed(0), 5
    law = Discounting(gamma=0.9, scale=3.0, shift=-0.5, paper_compat=compat)
    ends = [(n, a, b) for n in range(1, steps + 1) for a in (0, 1) for b in (0, 1)]
    rewards = torch.randn(len(ends), steps, generator=generator)
    reward, discount = law(rewards, torch.tensor(ends).float())
    for row, (length, terminated, truncated) in enumerate(ends):
        worth, weight = 0.0, 1.0
        for j in range(length):
            worth += weight * (3.0 * float(rewards[row, j]) - 0.5)
            weight *= 1.0 if compat else 0.9
        later = 0.9 if compat else weight
        stops = bool(terminated or (compat and truncated))
        assert float(reward[row]) == pytest.approx(worth, abs=1e-5)
        assert float(discount[row]) == pytest.approx(0.0 if stops else later, abs=1e-6)
