"""A study of Optuna around forge.Run: each trial is asked once and told once.

python optuna_study.py    # kill it whenever you like, and start it again
"""

import functools

import optuna
import torch

import forge
from forge.integrations.optuna import optimize

STEPS = 200


def objective(trial: optuna.Trial) -> float:
    """The loss after some steps, with the trial's learning rate."""
    rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    policy = {"checkpoint": {"dir": "runs/study", "every_steps": 20}}
    with forge.Run(policy, name=f"trial{trial.number}", model=model, optimizer=optimizer) as run:
        run.state.setdefault("loss", 0.0)
        for step in run.steps(STEPS):
            inputs = torch.randn(64, 8)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            run.update(loss, optimizer)
            run.state["loss"] = loss.item()
            if step % 20 == 0:
                trial.report(loss.item(), step)
                if trial.should_prune():
                    run.finish("pruned")
        is_pruned = run.step < STEPS
    if is_pruned:
        raise optuna.TrialPruned
    return run.state["loss"]


def main() -> None:
    """Try 10 learning rates."""
    study = optuna.create_study(
        study_name="lr",
        storage="sqlite:///study.db",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
        load_if_exists=True,
    )
    sampler = functools.partial(optuna.samplers.TPESampler, n_startup_trials=4)
    optimize(study, objective, 10, sampler=lambda number: sampler(seed=number))
    for trial in study.trials:
        print(trial.number, trial.state.name, trial.params, trial.value)


if __name__ == "__main__":
    main()
