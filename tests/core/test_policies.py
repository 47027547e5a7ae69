"""Policies by name."""

from __future__ import annotations

import numpy as np
import pytest

from expertstream import ConfigError
from expertstream.policies import Policy, make_policy, policy_names


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'hotnes'.*did you mean 'hotness'"):
        make_policy("hotnes", 8, 16)


@pytest.mark.parametrize("name", policy_names())
def test_two_policies_of_one_name_share_nothing(name: str) -> None:
    first, second = make_policy(name, 8), make_policy(name, 8)
    first.ranks.rank[:] = 7
    assert not second.ranks.rank.any()


class TestSeeding:
    """Experts 3, 5 and 1 of eight are seeded, hottest first, with half-life 4."""

    SEEDS = np.array([3, 5, 1])

    @staticmethod
    def victims(policy: Policy) -> list[int]:
        """All experts in the order in which they would be given up."""
        ranks = policy.ranks
        return sorted(range(8), key=lambda expert: (ranks.rank[expert], ranks.last_use[expert], expert))

    @pytest.mark.parametrize("scores", [[4.0, 2.0, 1.5], [0.0, 0.0, 0.0]])
    @pytest.mark.parametrize("name", policy_names())
    def test_seeds_go_after_all_others_and_the_hottest_goes_last(self, name: str, scores: list[float]) -> None:
        policy = make_policy(name, 8)
        policy.seed(self.SEEDS, np.array(scores))
        assert self.victims(policy)[-3:] == [1, 5, 3]

    @pytest.mark.parametrize("name", policy_names())
    def test_what_decode_selects_goes_after_a_seed_that_nobody_selected(self, name: str) -> None:
        policy = make_policy(name, 8)
        policy.seed(self.SEEDS, np.array([1.0, 1.0, 1.0]))
        for _ in range(3):
            policy.begin_pass(1)
            policy.select(policy.ranks, 0, np.array([7]), np.array([1]))
        assert self.victims(policy)[-1] == 7

    def test_no_score_lasts_longer_than_that_of_an_expert_which_every_token_selects(self) -> None:
        policy = make_policy("hotness", 8, 4)
        policy.seed(self.SEEDS, np.array([1e300, 3.0, 0.0]))
        assert policy.ranks.rank[self.SEEDS].tolist() == [8.0, 3.0, 1.0]
