import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions

from policies.errors import ConfigError
from policies.normalizer import MODES, CentredNormalizer, Normalizer
from policies.policy_config import PolicyConfig


def fitted(mode: str, data: torch.Tensor) -> Normalizer:
    stats = {"min": data.min(0).values, "max": data.max(0).values, "mean": data.mean(0), "std": data.std(0)}
    return Normalizer({"state": mode}, {"state": data.shape[1]}).fit({"state": stats})


@given(mode=st.sampled_from(MODES), seed=st.integers(0, 1000), scale=st.floats(1e-2, 1e3))
def test_decoding_inverts_encoding(mode: str, seed: int, scale: float) -> None:
    data = scale * torch.randn(20, 3, generator=torch.Generator().manual_seed(seed))
    normalizer = fitted(mode, data)
    back = normalizer.decode("state", normalizer.encode("state", data))
    torch.testing.assert_close(back, data, rtol=1e-5, atol=1e-5 * scale)


def test_limits_map_the_extremes_to_plus_and_minus_one() -> None:
    data = torch.tensor([[0.0, -4.0], [10.0, 4.0], [5.0, 0.0]])
    out = fitted("limits", data).encode("state", data)
    torch.testing.assert_close(out, torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]))


def test_gaussian_gives_zero_mean_and_unit_deviation() -> None:
    data = 7 + 3 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    out = fitted("gaussian", data).encode("state", data)
    torch.testing.assert_close(out.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std(0), torch.ones(2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["limits", "gaussian"])
def test_constant_features_are_shifted_but_not_blown_up(mode: str) -> None:
    data = torch.tensor([[2.0, 0.0], [2.0, 1.0]])
    out = fitted(mode, data).encode("state", torch.tensor([[2.001, 0.5]]))
    assert abs(out[0, 0].item()) < 0.01


@pytest.mark.parametrize("mode", ["limits", "gaussian"])
def test_entries_whose_variation_is_lost_are_told(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.linspace(-1, 1, 9)[:, None].double()
    # fine, small, coarse, constant, rounding, none left in float32
    rows = torch.cat([x, 4e-5 * x, 4e6 + x, 3 + 0 * x, 1e-12 * x, 1e6 + 1e-3 * x], dim=1)
    fitted(mode, rows.float())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    for line, said in zip(told, ("[5] state float32", "[1] state 0.0001", "[2] state float32"), strict=True):
        assert re.search(mentions(said), line)


def test_values_far_outside_the_data_are_clipped_and_the_rest_is_untouched() -> None:
    data = torch.tensor([[0.0, 0.0], [1.0, 0.002]])
    stats = {"min": data[0], "max": data[1], "mean": data.mean(0), "std": data.std(0)}
    clipped = Normalizer({"state": "limits"}, {"state": 2}, {"state": 3.0}).fit({"state": stats})
    plain = Normalizer({"state": "limits"}, {"state": 2}).fit({"state": stats})
    near, far = torch.tensor([[1.5, 0.003]]), torch.tensor([[-0.5, 2.0]])
    assert torch.equal(clipped.encode("state", near), plain.encode("state", near))
    assert clipped.encode("state", far).tolist() == [[-2.0, 3.0]]
    assert plain.encode("state", far)[0, 1] > 1000


def test_identity_is_never_clipped_and_a_clip_inside_the_data_is_refused() -> None:
    normalizer = Normalizer({"state": "identity"}, {"state": 1}, {"state": 2.0})
    assert normalizer.encode("state", torch.tensor([[40.0]])).item() == 40.0
    for clip in (0.5, float("nan")):
        with pytest.raises(ConfigError, match=mentions("policy.observation_clip 1")):
            PolicyConfig(observation_clip=clip)


def test_a_feature_without_statistics_is_an_error() -> None:
    with pytest.raises(ConfigError, match=mentions("state")):
        Normalizer({"state": "limits"}, {"state": 2}).fit({})


def test_statistics_of_another_width_or_not_finite_are_errors() -> None:
    stats = {name: torch.ones(3) for name in ("min", "max", "mean", "std")}
    with pytest.raises(ConfigError, match=mentions("shape (2,) (3,)")):
        Normalizer({"state": "limits"}, {"state": 2}).fit({"state": stats})
    for wrong in (float("nan"), float("inf")):  # a range without end would be divided by
        stats |= {name: torch.tensor([1.0, wrong, 1.0]) for name in ("max", "std")}
        for mode in ("limits", "gaussian"):
            with pytest.raises(ConfigError, match=mentions("finite")):
                Normalizer({"state": mode}, {"state": 3}).fit({"state": stats})


def test_unknown_modes_and_features_are_named() -> None:
    with pytest.raises(ConfigError, match=mentions("minmax limits gaussian identity")):
        Normalizer({"state": "minmax"}, {"state": 2})
    with pytest.raises(ConfigError, match=mentions("action")):
        Normalizer({"state": "identity"}, {"state": 2}).encode("action", torch.zeros(1, 2))


@pytest.mark.parametrize("mode", MODES)
def test_centred_maps_are_the_same_and_need_no_fused_operation(mode: str) -> None:
    data = 1.57 + 2e-3 * torch.rand(100, 3, generator=torch.Generator().manual_seed(0))
    plain = fitted(mode, data)
    scale, offset = plain.state_scale, plain.state_offset
    truth = data.double() * scale.double() + offset.double()
    found = CentredNormalizer(plain).encode("state", data)
    assert (found - truth).abs().max() < 1e-6
    if mode != "identity":  # what a graph does with scale and offset: it rounds twice
        assert ((data * scale) + offset - truth).abs().max() > 1e-5


def test_centred_maps_clip_where_the_plain_ones_do() -> None:
    plain = Normalizer({"state": "limits"}, {"state": 2}, {"state": 2.0})
    plain.fit({"state": {"min": torch.tensor([0.0, 1.0]), "max": torch.tensor([1.0, 3.0])}})
    x = torch.tensor([[9.0, -9.0], [0.25, 2.5]])
    torch.testing.assert_close(CentredNormalizer(plain).encode("state", x), plain.encode("state", x))
    torch.testing.assert_close(CentredNormalizer(plain).decode("state", x), plain.decode("state", x))
