"""Two Ray nodes with SkyRL 0.3, one without the package."""

from __future__ import annotations

from contract_tests.overlay.cluster_suite import ClusterContract
from contract_tests.overlay.fake_skyrl import CONVERT, PREPROCESS


class TestCluster(ClusterContract):
    release = "0.3.0"
    module = PREPROCESS
    function = CONVERT
