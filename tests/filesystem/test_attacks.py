"""A colleague who may write to a shared directory gets nothing run, and nothing of ours changed."""

import os

import pytest
from all_attacks import judge
from attempts import ATTACKS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play two users")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_refused_with_its_message(attack):
    """Each was seen to work: code that ran as the victim, files that were cut off or written to."""
    verdict, said = judge(attack)
    assert verdict in ("refused", "harmless"), said
