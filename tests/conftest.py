"""What holds for all tests: one torch thread, and hypothesis without a clock (and without chance where CI is set)."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("paceline", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("paceline")
