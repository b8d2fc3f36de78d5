"""Small rank scripts for tests, by what they do."""

from __future__ import annotations

import textwrap
from pathlib import Path

ENVIRONMENT = """
    import json, os, sys
    names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE NODE_RANK GROUP_RANK CROSS_RANK CROSS_SIZE "
             "MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES OMP_NUM_THREADS").split()
    print("ENV " + json.dumps({name: os.environ.get(name) for name in names}))
    print("ARGV " + json.dumps(sys.argv[1:]))
    print("CWD " + os.getcwd())
"""

# Rank 1 fails in the way its first argument says; the others wait for ever.
BIPOLAR = """
    import os, signal, sys, time
    if os.environ["RANK"] == "1":
        time.sleep(0.2)
        kind = sys.argv[1]
        if kind == "exit":
            sys.exit(3)
        if kind == "raise":
            raise ValueError("the data is bad")
        if kind == "message":
            sys.exit("no such dataset")
        os.kill(os.getpid(), getattr(signal, kind))
    time.sleep(600)
"""

# Every rank ignores SIGTERM and has a child in a session of its own that ignores it too.
STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal,time; signal.signal(15, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    print("READY", flush=True)
    time.sleep(600)
"""

# Every rank needs a while to save, says how often it was asked to, and ends in order.
SAVES = """
    import signal, sys, time
    def save(*_):
        print("ASKED", flush=True)
        time.sleep(1.5)
        print("SAVED", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("READY", flush=True)
    time.sleep(600)
"""

# The rank's child has nothing of the job in its environment; it leads a session of its own.
ORPHAN = """
    import os, subprocess, sys, time
    subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True, env={"PATH": os.environ["PATH"]})
    print("READY", flush=True)
    time.sleep(600)
"""


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    """Write a script and return its path."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path
