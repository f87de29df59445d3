"""How cores are divided."""

from __future__ import annotations

from services.launch.cores import divide_cores


def test_one_pair_on_two_cores_shares_the_last() -> None:
    shares = divide_cores([0, 1], num_targets=1, num_drafts=1)
    assert shares.targets == ((0, 1),)
    assert shares.drafts == ((1,),)
    assert shares.drafts_share


def test_without_drafts_targets_get_everything() -> None:
    assert divide_cores([0, 1, 2, 3], num_targets=2, num_drafts=0).targets == ((0, 1), (2, 3))


def test_more_workers_than_cores_share() -> None:
    shares = divide_cores([0, 1], num_targets=3, num_drafts=3)
    assert shares.targets == ((0,), (1,), (0,))
    assert shares.drafts == ((1,), (0,), (1,))


def test_drafts_beside_their_targets_share_their_last_core() -> None:
    shares = divide_cores([0, 1, 2, 3], num_targets=2, num_drafts=4, drafts_beside_targets=True)
    assert shares.targets == ((0, 1), (2, 3))
    assert shares.drafts == ((1,), (1,), (3,), (3,))


def test_a_large_host_is_left_to_the_operating_system() -> None:
    shares = divide_cores(range(64), num_targets=1, num_drafts=1)
    assert shares.targets == (None,)
    assert shares.drafts == (None,)
    assert not shares.drafts_share
