"""The time limit is announced early, while the job starts up: it trains all the same."""

import pytest
from main_scripts import make

TRAIN = """
    import os, signal, time
    from pathlib import Path
    import hydra, torch
    from hydra.core.hydra_config import HydraConfig
    import forge

    def announce(place):
        job = Path(os.environ["FORGE_JOB_DIR"])
        if os.environ["FORGE_RESTART_COUNT"] == "0" and job.name == place:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.01)  # here it would interrupt

    if __name__ == "__mp_main__":
        announce("import")

    class Counter:
        def state_dict(self):
            announce("entering")
            return {}

        def load_state_dict(self, state):
            pass

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        out = Path(HydraConfig.get().runtime.output_dir)
        announce("main")
        if cfg.place == "due" and os.environ["FORGE_RESTART_COUNT"] == "0":
            forge.on_stop((out / "cleaned up").touch)
            end = time.time() + cfg.resilience.shutdown.timeout_s + 5
            os.environ["FORGE_END_TIME"] = str(end)
            announce("due")
            (out / "went on").touch()
            while True:
                time.sleep(0.01)
        model = torch.nn.Linear(2, 1)
        with forge.Run(cfg.resilience, model=model, counter=Counter()) as run:
            for step in run.steps(3):
                pass
        return run.step

    if __name__ == "__main__":
        main()
"""
CONF = """
    defaults: [{resilience: default}, _self_]
    place: ???
    hydra: {sweep: {subdir: '${place}'}}
    resilience:
      health: {enabled: false}
      shutdown: {timeout_s: 20}
      signal: {warning_s: 30}
"""


@pytest.mark.slow
def test_an_early_announcement_does_not_end_the_start_up(tmp_path):
    """Slurm's comes up to a minute early: an attempt that leaves then has trained nothing.

    One that is still starting up when the announcement is due leaves then.
    """
    places = ["import", "main", "entering"]
    app = make(tmp_path / "app", TRAIN, CONF)
    app.finish(f"place={','.join(places)},due", "hydra.launcher.timeout_min=1.8")
    restarts = {place: app.job(place).state["counts"]["restarts"] for place in [*places, "due"]}
    assert restarts == {"import": 0, "main": 0, "entering": 0, "due": 1}
    late = app.job("due")
    assert (late.directory / "went on").exists()
    assert (late.directory / "cleaned up").exists()
