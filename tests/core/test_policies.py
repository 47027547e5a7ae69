"""Policies by name."""

from __future__ import annotations

import pytest

from expertstream import ConfigError
from expertstream.policies import make_policy, policy_names


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'hotnes'.*did you mean 'hotness'"):
        make_policy("hotnes", 8, 16)


@pytest.mark.parametrize("name", policy_names())
def test_two_policies_of_one_name_share_nothing(name: str) -> None:
    first, second = make_policy(name, 8, 16), make_policy(name, 8, 16)
    first.ranks.rank[:] = 7
    assert not second.ranks.rank.any()
