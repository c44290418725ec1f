"""The coin: uniform, independent between seeds, groups and columns, pinned, and exact in expectation."""

import pytest
import torch

from vpcce import sampling

SEEDS = [torch.tensor(s) for s in (0, 1, 2**61 + 12345, 2**31 - 1, 987654321987654321)]
BLOCKS = torch.arange(0, 64)
COLUMNS = torch.arange(0, 4096)
PINNED = [[11684683, 5081402, 11227730], [11684683, 5081402, 11227730], [7513857, 7383859, 11357413]]


def uniform(seed, blocks=BLOCKS, columns=COLUMNS):
    return sampling.coin(seed, blocks, columns).double() / sampling.LEVELS


def test_values_are_pinned():
    """Checkpointed runs are resumed with the same coins: the hash is part of the interface."""
    values = sampling.coin(torch.tensor(2**61 + 12345), torch.tensor([0, 3, 4]), torch.tensor([0, 1, 151935]))
    assert values.tolist() == PINNED


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_uniform(seed):
    u = uniform(seed, BLOCKS[::4])
    counts = torch.histc(u.flatten(), 256, 0, 1)
    expected = u.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert 150 < chi_square < 375  # 255 degrees of freedom: 5 standard deviations are +-113
    assert u.min() >= 0 and u.max() < 1


def test_four_row_blocks_share_a_coin():
    u = uniform(SEEDS[2])
    assert torch.equal(u[0::4], u[1::4]) and torch.equal(u[0::4], u[3::4])
    assert not torch.equal(u[0], u[4])


def test_independent_between_groups_seeds_and_neighbouring_columns():
    u = torch.cat([uniform(seed, BLOCKS[::4]) for seed in SEEDS]) - 0.5
    n = u.shape[1]
    correlation = (u @ u.T) / (n / 12)
    off_diagonal = correlation - torch.diag(correlation.diagonal())
    assert off_diagonal.abs().max() < 5.5 / n**0.5
    for lag in (1, 2, 8, 256):
        assert ((u[:, lag:] * u[:, :-lag]).mean() * 12).abs() < 5 / u.numel() ** 0.5


@pytest.mark.parametrize("ratio", [1.0, 0.5, 1e-2, 1e-4, 2.0**-24, 1e-9])
def test_probability_is_the_grids_next_value(ratio):
    """keep iff k < y has probability ceil(y) / 2^24, and the scale is its inverse: the expectation is m, exactly."""
    eps = 2.0**-12
    m = torch.full((1, 1), ratio * eps, dtype=torch.float64)
    levels = min(-(-m.item() * sampling.LEVELS // eps), sampling.LEVELS)
    columns = torch.arange(2**18)
    scale = sampling.keep_scale(m.expand(1, len(columns)), eps, SEEDS[2], torch.tensor([0]), columns)
    kept = scale[scale > 0]
    q = levels / sampling.LEVELS
    assert torch.all(kept == 1 / q)
    spread = (q * (1 - q) / len(columns)) ** 0.5
    assert abs(len(kept) / len(columns) - q) <= 5 * spread + 1e-12


def test_edges():
    """At least eps is always kept unscaled, 0 never, and a NaN shows."""
    eps = 2.0**-12
    m = torch.tensor([[eps, 1.0, 0.0, torch.nan]])
    for seed in SEEDS:
        scale = sampling.keep_scale(m, eps, seed, torch.tensor([5]), torch.arange(4))[0]
        assert scale[:3].tolist() == [1.0, 1.0, 0.0] and scale[3].isnan()


def test_nested_in_a_group():
    """The shared coin nests the kept sets: what a row block with smaller m keeps, one with larger m keeps too."""
    m = torch.rand(4, 5000) * 2**-12
    scale = sampling.keep_scale(m, 2**-12, SEEDS[3], torch.arange(4), torch.arange(5000))
    order = m.argsort(0)
    kept = (scale.gather(0, order) > 0).int()
    assert torch.all(kept[1:] >= kept[:-1])
