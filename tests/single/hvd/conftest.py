"""Lets the tests of this folder import the benchmarks' simulation of the engine."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "agreement"))
