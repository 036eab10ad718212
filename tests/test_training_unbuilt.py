"""Settings that the configuration knows and the loop does not act on are refused, not ignored."""

from __future__ import annotations

from typing import Any

import pytest

from deployer.errors import UsageError
from deployer.training import config


@pytest.mark.parametrize(
    "setting",
    [
        {"qat": {"enabled": True}},
        {"qat": {"start_step": 5}},
        {"export_check": {"formats": ["onnx"]}},
        {"export_check": {"timeout_s": 60}},
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not built yet"):
        config.make_config(setting)
