"""Tests for implementations outside this package: `DialectTests` (dialect.py), the base class of a dialect's tests.

Subclass it in a test file of pytest, and set the attributes that it declares. pilotflame does not install pytest.
Nothing else in pilotflame imports this package.
"""

import pytest

# pytest then shows the values in a failed assertion.
pytest.register_assert_rewrite(f"{__name__}.dialect")
