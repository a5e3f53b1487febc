"""Two Ray nodes with SkyRL 0.4, one without the package."""

from __future__ import annotations

from contract_tests.overlay.cluster_suite import ClusterContract
from contract_tests.overlay.fake_skyrl import CLIENT


class TestCluster(ClusterContract):
    release = "0.4.0"
    module = CLIENT
    function = "RemoteGenerateClient.generate"
