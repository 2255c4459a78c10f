"""Optuna studies that have each trial once, although jobs and launchers are killed.

`Storage` is for Hydra's Optuna sweeper: a launcher that is started again asks for the same trials,
forge's launchers have the results of those that have ended, and the study gets each trial once.
`optimize` is for a script with a study of its own: it continues the trial that was interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import forge
from forge import messages
from forge.integrations.refusal import missing

try:
    import optuna
    from optuna.storages import InMemoryStorage
    from optuna.trial import TrialState
except ImportError as error:
    raise missing("optuna", "optuna", error) from error

from forge.compat import of_optuna


class Storage(InMemoryStorage):
    """Adds each trial to a study in a database once it has ended; for Hydra's Optuna sweeper.

    Whenever the sweep is started, the sampler draws all trials again, so it needs a seed::

        hydra:
          sweeper:
            sampler: {seed: 1}
            study_name: lr
            storage: {_target_: forge.integrations.optuna.Storage, url: "sqlite:///study.db"}

    Args:
        url: The database, as for `optuna.create_study(storage=…)`. The study belongs to one sweep.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._name = ""
        self._study: Any = None
        """The study in the database."""
        self._told: dict[int, Any] = {}
        """Number -> trial, for those that the study in the database has."""

    def create_new_study(self, *args: Any, **kwargs: Any) -> int:
        """Create the study in memory, and read the trials of the one in the database."""
        name = kwargs.get("study_name") or next((one for one in args if isinstance(one, str)), "")
        if not name:
            raise _problem("`hydra.sweeper.study_name`: expected a name, found null. Choose one.")
        try:
            told = optuna.load_study(study_name=name, storage=self._url).get_trials(deepcopy=False)
        except KeyError:
            told = []
        self._name, self._told = name, {one.number: one for one in told}
        return int(super().create_new_study(*args, **kwargs))

    def set_trial_param(self, trial_id: int, param_name: str, value: float, how: Any) -> None:
        """Record a parameter; in a trial that the database has, it must be the same again."""
        number = self.get_trial_number_from_id(trial_id)
        if number in self._told:
            had = self._told[number].params.get(param_name)
            drawn = how.to_external_repr(value)
            if drawn != had:
                raise _problem(
                    f"Trial {number} of the study `{self._name}` in {self._url}: expected"
                    f" {param_name}={had}, which it had before; the sampler has drawn {drawn}. Set"
                    " `hydra.sweeper.sampler.seed` as it was, or choose another"
                    " `hydra.sweeper.study_name`."
                )
        super().set_trial_param(trial_id, param_name, value, how)

    def set_trial_values(self, trial_id: int, values: Sequence[float]) -> None:
        """Record the results; called by Optuna 2."""
        told = self._told.get(self.get_trial_number_from_id(trial_id))
        super().set_trial_values(trial_id, values if told is None else told.values)

    def set_trial_state(self, trial_id: int, state: Any) -> bool:
        """Record the end of a trial; called by Optuna 2."""
        told = self._told.get(self.get_trial_number_from_id(trial_id))
        is_set = super().set_trial_state(trial_id, state if told is None else told.state)
        return self._add(trial_id, is_set=is_set)

    def set_trial_state_values(self, trial_id: int, state: Any, values: Any = None) -> bool:
        """Record the end of a trial, and its results; called by Optuna 3 and later."""
        told = self._told.get(self.get_trial_number_from_id(trial_id))
        if told is not None:
            state, values = told.state, told.values
        return self._add(trial_id, is_set=super().set_trial_state_values(trial_id, state, values))

    def _add(self, trial_id: int, *, is_set: bool) -> bool:
        trial = self.get_trial(trial_id)
        if trial.number not in self._told and trial.state.is_finished():
            study_id = self.get_study_id_from_trial_id(trial_id)
            directions = [one.name.lower() for one in self.get_study_directions(study_id)]
            if self._study is None:
                self._study = optuna.create_study(
                    storage=self._url,
                    study_name=self._name,
                    directions=directions,
                    load_if_exists=True,
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optuna 2 calls add_trial experimental
                self._study.add_trial(trial)
            self._told[trial.number] = trial
        return is_set

    def __str__(self) -> str:
        return self._url


def optimize(
    study: Any,
    objective: Callable[[Any], Any],
    n_trials: int,
    *,
    sampler: Callable[[int], Any] | None = None,
    catch: tuple[type[Exception], ...] = (),
) -> None:
    """As `study.optimize`, for a script that forge stops, requeues and starts again.

    A trial that was interrupted continues with its parameters; `n_trials` counts the trials of all
    starts. Enqueued trials run first. One process at a time can work on the study. Example::

        study = optuna.create_study(study_name="lr", storage=url, load_if_exists=True)
        optimize(study, objective, 20, sampler=lambda seed: optuna.samplers.TPESampler(seed=seed))

    Args:
        study: A study with a storage that survives the process.
        objective: Gets a trial, returns its value; it uses `forge.Run(…, name=f"{trial.number}")`.
        n_trials: The number of trials of the study when this returns.
        sampler: Makes the sampler of a trial from the trial's number, so that a restart changes no
            parameters. None: the study's own sampler, which draws others after a restart.
        catch: Errors that fail a trial, and not the script.
    Raises:
        ForgeError: If the study is in memory.
    """
    if of_optuna.is_in_memory(study):
        raise forge.ForgeError(
            'optimize(): expected a study with a storage, as by optuna.create_study(storage="'
            'sqlite:///study.db", …), found one in memory, which a restart would lose.'
        )
    trials = study.get_trials(deepcopy=False)
    if sampler is None and any(one.state is not TrialState.WAITING for one in trials):
        study.sampler.reseed_rng()  # a seeded sampler would draw the first parameters again
        messages.warn(
            f"The study `{study.study_name}` has trials already, and the random numbers of its"
            " sampler are not saved: new trials get other parameters than without a restart. Use"
            " optimize(…, sampler=…) to avoid this"
        )
    while True:
        trials = study.get_trials(deepcopy=False)
        running = [one for one in trials if one.state is TrialState.RUNNING]
        enqueued = [one for one in trials if one.state is TrialState.WAITING]
        if not running and len(trials) - len(enqueued) >= n_trials:
            return
        if sampler is not None:
            numbers = [one.number for one in running + enqueued]
            study.sampler = sampler(numbers[0] if numbers else len(trials))
        trial = of_optuna.continued(study, running[0]) if running else study.ask()
        try:
            value = objective(trial)
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
        except catch as error:
            messages.warn(f"Trial {trial.number} failed: {type(error).__name__}: {error}")
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, value)


def _problem(text: str) -> forge.ConfigError:
    return forge.ConfigError([text], "The sweep")
