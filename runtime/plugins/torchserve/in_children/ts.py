"""Provides the stand-in for `ts` to processes that a handler starts."""

import sys

from pilotflame.runtime.plugins.torchserve.sdk import stand_in

sys.modules.update(stand_in())
