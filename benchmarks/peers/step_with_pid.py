"""Run first_step.py, then create PID.pid in the folder that is the argument."""

import os
import runpy
import sys
from pathlib import Path

folder = Path(sys.argv[1])
script = str(Path(__file__).with_name("first_step.py"))
sys.argv = [script, str(folder / "mark")]
runpy.run_path(script, run_name="__main__")
(folder / f"{os.getpid()}.pid").touch()
