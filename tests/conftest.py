"""Shared set-up of all tiers: makes tests/equipment importable as `equipment`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
