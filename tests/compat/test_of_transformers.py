"""What forge needs of transformers' private parts; in a process that has imported transformers."""

from contracts import contract
from trained import check_part

from forge.compat import of_transformers


def test_trainer_with_hooks():
    """The loop begins where the hook says, and each pass skips as many batches."""
    with contract(of_transformers.trainer_with_hooks):
        check_part("trainer_with_hooks")


def test_sums():
    """These sums make up the losses that the Trainer logs."""
    with contract(of_transformers.sums, of_transformers.restore_sums):
        check_part("sums")
        check_part("restore_sums")


def test_names_of_lasting_eval_loaders():
    """Loaders without persistent workers are made for each evaluation."""
    with contract(of_transformers.names_of_lasting_eval_loaders):
        check_part("names_of_lasting_eval_loaders")
