"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# Two shared cores: a deadline per example would measure the neighbours.
settings.register_profile("longppo", deadline=None, max_examples=50)
settings.load_profile("longppo")
