"""What forge needs of Accelerate's private parts; in a process that has imported Accelerate."""

from contracts import contract
from trained import check_part

from forge.compat import of_accelerate


def test_prepared():
    """In this order and without copies: forge names the states by their numbers."""
    with contract(of_accelerate.prepared):
        check_part("prepared")


def test_loaders():
    """The very object that the script iterates over."""
    with contract(of_accelerate.loaders):
        check_part("loaders")
