"""The app whose sweeps are looked at, cancelled and resumed."""

from sweeps import TRAIN

MISBEHAVE = """
    if cfg.mode == "raises" and step == 17:
        raise ValueError("planted error")
    if cfg.mode == "dies" and step == 25 and RESTARTS == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.mode == "exits" and step == 12:
        os._exit(9)
"""
LOG = "run.log(loss=loss)\n"
TRAINING = TRAIN.replace(LOG, f"{LOG}{' ' * 16}if step % 10 == 0: run.log(val_acc=step / 100)\n")
CONF = """
    defaults: [{resilience: default}, _self_]
    lr: 0.1
    seed: 3
    steps: 40
    step_s: 0
    mode: ends
    resilience:
      checkpoint: {every_steps: 10, every_s: null}
"""
