"""A job whose helpers must answer after a signal to the whole session: python helpers.py <dir>"""

import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import forge
from forge.filesystem.files import write_atomically

directory = Path(sys.argv[1])
ECHO = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"


def echo(connection):
    while True:
        connection.send(connection.recv())


def answer(word):
    return word


def main():
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    policy = {"checkpoint": {"dir": str(directory / "checkpoints")}}
    with forge.Run(policy, model=model) as run:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        forked = fork.Process(target=echo, args=(theirs,), daemon=True)
        forked.start()
        with forge.block_signals():
            spawned = subprocess.Popen(
                [sys.executable, "-c", ECHO],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        pool = ProcessPoolExecutor(1, mp_context=fork)
        assert pool.submit(answer, "pool").result() == "pool"

        def ask():
            ours.send("forked")
            spawned.stdin.write("shielded\n")
            spawned.stdin.flush()
            words = [ours.recv(), spawned.stdout.readline().strip()]
            words.append(pool.submit(answer, "pool").result())
            write_atomically(directory / "answers.txt", "\n".join(words))

        run.on_stop(ask)
        for step in run.steps(10_000):
            if step == 3:
                (directory / "ready").touch()
            time.sleep(0.01)


if __name__ == "__main__":
    main()
