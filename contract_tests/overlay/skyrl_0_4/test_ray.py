"""Real Ray with SkyRL 0.4."""

from __future__ import annotations

from contract_tests.overlay.fake_skyrl import CLIENT
from contract_tests.overlay.ray_suite import RayContract


class TestRay(RayContract):
    release = "0.4.0"
    module = CLIENT
    function = "load_packed_body"
