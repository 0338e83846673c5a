"""Run first_step.py; then, with "stay", wait until the memory is measured.

    python benchmarks/peers/step_and_stay.py FOLDER [stay]

Creates FOLDER/PID.pid after the step; with "stay", exits when FOLDER/go exists.
"""

import os
import runpy
import sys
import time
from pathlib import Path

folder, stays = Path(sys.argv[1]), sys.argv[2:] == ["stay"]
script = str(Path(__file__).with_name("first_step.py"))
sys.argv = [script, str(folder / "mark")]
runpy.run_path(script, run_name="__main__")
(folder / f"{os.getpid()}.pid").touch()
while stays and not (folder / "go").exists():
    time.sleep(0.05)
