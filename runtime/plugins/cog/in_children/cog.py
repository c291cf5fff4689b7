"""Provides the stand-in for `cog` to processes that a predictor starts."""

import sys

from pilotflame.runtime.plugins.cog.sdk import stand_in

sys.modules.update(stand_in())
