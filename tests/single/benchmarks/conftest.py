"""Lets the tests of this folder import what the benchmarks have in common."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
