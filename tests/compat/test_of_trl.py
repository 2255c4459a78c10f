"""What forge needs of TRL's private parts; in a process that imports TRL."""

import pytest
from contracts import contract
from trained import check_part

from forge.compat import of_trl

pytestmark = pytest.mark.proofs  # which install TRL


def test_logged_attributes():
    """A training fills them, and `log` empties them."""
    with contract(of_trl.logged_attributes):
        check_part("logged_attributes")


def test_keeps_batches():
    """GRPO generates batches for several steps; SFT does not."""
    with contract(of_trl.keeps_batches):
        check_part("keeps_batches")
