"""`python -m gpu.checks MODULE ...`: run the checks of modules in this worker."""

from __future__ import annotations

import sys
from importlib import import_module

sys.exit(max([import_module(f"gpu.checks.{name}").main() for name in sys.argv[1:]]))
