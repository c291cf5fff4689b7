"""Contract tests for implementations outside this package: a base class for each interface that others implement.

Subclass one in a test file of pytest, and give it the fixtures that its docstring names: `SourceTests` (source.py),
`JobStoreTests` (job_store.py), `DialectTests` (dialect.py), `LauncherTests` (launcher.py) and `DeviceTests` (device.py).
They need pytest, which pilotflame does not install. The async ones need pytest-asyncio with `asyncio_mode = "auto"`.
Nothing else in pilotflame imports this package.
"""

import pytest

# pytest then shows the values in a failed assertion.
pytest.register_assert_rewrite(
    *(f"{__name__}.{name}" for name in ("device", "dialect", "job_store", "launcher", "source"))
)
