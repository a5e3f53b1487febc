"""Real Ray with SkyRL 0.3."""

from __future__ import annotations

from contract_tests.overlay.fake_skyrl import CONVERT, PREPROCESS
from contract_tests.overlay.ray_suite import RayContract


class TestRay(RayContract):
    release = "0.3.0"
    module = PREPROCESS
    function = CONVERT
