"""Reference returns and normalised scores against D4RL's own tables."""

from pathlib import Path

import numpy as np
import pytest

from envs.evaluation.scores import normalized_score, reference, references


@pytest.fixture
def golden(golden_path: Path):
    return np.load(golden_path)


@pytest.mark.golden("d4rl_scores*.npz")
def test_reference_table_is_the_official_one(golden):
    table = references()
    rows = zip(golden["names"], golden["ref_min"], golden["ref_max"], strict=True)
    for name, low, high in rows:
        assert (table[name].min_return, table[name].max_return) == (low, high), name


@pytest.mark.golden("d4rl_scores*.npz")
def test_references_of_environments_are_the_official_ones(golden):
    assert set(references()) == set(golden["env_names"].tolist())
    rows = zip(golden["env_names"], golden["env_ref_min"], golden["env_ref_max"], strict=True)
    for name, low, high in rows:
        assert reference(str(name)).returns == (low, high), name


@pytest.mark.golden("d4rl_scores*.npz")
def test_scores_and_their_inverse(golden):
    for name, scores, returns in zip(
        golden["names"], golden["scores"], golden["reverse_returns"], strict=True
    ):
        np.testing.assert_allclose(normalized_score(str(name), golden["returns"]) / 100, scores, rtol=1e-12)
        found = normalized_score(str(name), returns) / 100
        np.testing.assert_allclose(found, golden["reverse_inputs"], rtol=1e-12, atol=1e-12)
