"""The processes that most tests of sweeps fork begin as those that Python starts."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import warm
from started import Popen

SEEN = """
    import json, os, signal, sys, threading, warnings
    from pathlib import Path

    def environ():
        text = Path("/proc/self/environ").read_bytes()
        return sorted(line.decode() for line in text.split(b"\\0") if line)

    status = Path("/proc/self/status").read_text().splitlines()
    print(json.dumps({
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": [sys.modules["__main__"].__dict__ is globals(), __name__, __spec__ is None],
        "file": globals().get("__file__"),
        "environ": environ(),
        "os.environ": sorted(f"{k}={v}" for k, v in os.environ.items()),
        "cwd": os.getcwd(),
        "parent": os.getppid(),
        "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
        "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "files": [os.readlink(f"/proc/self/fd/{fd}").partition("[")[0] for fd in (0, 1, 2)],
        "more files": [fd for fd in range(3, 20) if os.path.exists(f"/proc/self/fd/{fd}")],
        "umask": [line for line in status if line.startswith("Umask")],
        "warnings": sys.warnoptions,
        "threads": threading.active_count(),
        "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
        "stdin": sys.stdin.read(),
    }))
"""
ENDS = {
    "returns": "",
    "a code": "import sys; sys.exit(75)",
    "a text": "import sys; sys.exit('no')",
    "an error": "raise ValueError('x')",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "ctrl+c": "import os; os.kill(os.getpid(), 2)",
    "at exit": "import atexit; atexit.register(print, 'bye')",
    "a thread": "import threading; threading.Timer(0.1, print, ['done']).start()",
    "closed": "import os; os.close(1); print('x')",
    "aborts": "import os; os.abort()",
}


def of_both(folder, *command, **options):
    """What a started and a forked process of Python print and end with."""
    both = []
    for popen in (Popen, warm.Popen):
        with popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=folder,
            **options,
        ) as process:
            output, errors = process.communicate(timeout=100)
        both.append((process.returncode, output, errors.replace(str(process.pid), "PID")))
    return both


@pytest.mark.parametrize("kind", ["a script", "a command", "isolated", "a module"])
def test_it_sees_what_a_fresh_one_sees(kind, tmp_path):
    script = tmp_path / "seen.py"
    script.write_text(textwrap.dedent(SEEN))
    command = {
        "a script": ["-u", "seen.py"],
        "a command": ["-u", "-B", "-c", textwrap.dedent(SEEN)],
        "isolated": ["-I", "-S", "-c", textwrap.dedent(SEEN)],
        "a module": ["-m", "seen"],
    }[kind]
    env = {**os.environ, "ONE": "ü=1", "TOKEN": "x" * 999}
    before = os.umask(0o27)
    fresh, forked = of_both(tmp_path, *command, "1", "-x", env=env)
    os.umask(before)
    assert forked[0] == fresh[0] == 0, forked
    one, other = json.loads(fresh[1]), json.loads(forked[1])
    if kind in ("isolated", "a module"):
        assert set(one.pop("path")) <= set(other.pop("path"))
        assert one.pop("main")[1] == other.pop("main")[1]
    assert other == one
    assert one["parent"] == os.getpid()


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_fresh_one_ends(end, tmp_path):
    fresh, forked = of_both(tmp_path, "-c", ENDS[end])
    assert forked[0] == fresh[0]
    assert forked[1] == fresh[1]
    assert forked[2].splitlines()[-1:] == fresh[2].splitlines()[-1:]


APP = """
import hydra

@hydra.main(version_base=None, config_path=".", config_name="conf")
def main(cfg):
    pass

main()
"""
CONF = """
defaults: [{resilience: debug}, {model: small}, {name: "${model}"}, _self_]
lr: 0.1
hydra: {job: {chdir: false}}
"""


@pytest.mark.parametrize("has_own", [False, True])
def test_it_composes_what_a_fresh_one_composes(has_own, tmp_path):
    """`hydra_once.py` has merged Hydra's own configs, unless a user chooses another of them."""
    (tmp_path / "train.py").write_text(APP)
    for name, text in {
        "conf": CONF,
        "model/small": "width: 4",
        "name/small": "name: of a small one",
        "hydra/help/own": "template: their own",
    }.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    given = ["hydra/launcher=local", "resilience.requeue.max_failures=1", "hydra.run.dir=out"]
    given += ["hydra/help=own"] if has_own else []
    fresh, forked = of_both(tmp_path, "train.py", *given, "--cfg", "all")
    assert fresh[0] == 0, fresh
    assert forked == fresh
    assert "of a small one" in fresh[1]
    assert ("their own" in fresh[1]) == has_own
