"""What is known of other processes."""

from __future__ import annotations

import os
import subprocess
import sys

from harness.launch.command import wait_until

from launcher.base.processes import descendants


def test_descendants_are_found_across_sessions() -> None:
    code = "import subprocess,sys,time; subprocess.Popen(['sleep','600'], start_new_session=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        wait_until(lambda: len(descendants(process.pid)) == 1, "the grandchild")
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            os.kill(pid, 9)
        process.wait()
