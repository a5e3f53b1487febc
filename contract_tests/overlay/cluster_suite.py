"""Real Ray on two nodes of one machine, one of them without the package: a cluster in the middle of a roll-out.

A line's tests derive from :class:`ClusterContract` and say what they look at in the workers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from contract_tests.child import run_python
from contract_tests.overlay import fake_skyrl

PEER = Path(__file__).with_name("cluster_peer.py")
WITH, WITHOUT = "with", "without"
MISSING = "ModuleNotFoundError: No module named 'skyrl_r3'"
VALUES = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]

DRIVERS = pytest.mark.parametrize("side", ["with", "without"], ids=["driver with it", "driver without it"])


class ClusterContract:
    """Tests that hold in every line.

    Attributes:
        release: The SkyRL of the line.
        module: One with a target.
        function: The target, a function or method of that module.
    """

    release: str
    module: str
    function: str

    @pytest.fixture(scope="class")
    def seen(self, wheel_python: Path, plain_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """What the drivers saw."""
        double = fake_skyrl.build(tmp_path_factory.mktemp("double"), like=self.release)
        with tempfile.TemporaryDirectory(prefix="r3-", ignore_cleanup_errors=True) as folder:
            env = {
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
                # Not where Ray's other programs look for "the latest cluster", and short: it holds sockets.
                "RAY_TMPDIR": folder,
                # Without it Ray takes another address of this machine for 127.0.0.1, and listens on all of them.
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            }
            arguments = [str(plain_python), str(double), self.module, self.function]
            return run_python([str(wheel_python), str(PEER), "build", *arguments], env=env).values

    @DRIVERS
    def test_workers_are_patched_where_the_package_is_installed(
        self, seen: dict[str, Any], side: str, wheel_python: Path, plain_python: Path
    ) -> None:
        """It depends on their node, and not on the driver."""
        nodes = {node: found["value"] for node, found in seen[side]["nodes"].items()}
        facts = {node: [found[key] for key in ("package", "patched", "finders")] for node, found in nodes.items()}
        assert facts == {WITH: [True, True, 1], WITHOUT: [False, False, 0]}
        assert {node: found["python"] for node, found in nodes.items()} == {
            WITH: str(wheel_python),
            WITHOUT: str(plain_python),
        }
        assert nodes[WITH]["node"] != nodes[WITHOUT]["node"]
        driver = seen[side]["driver"]
        assert driver["package"] is driver["patched"] is (side == "with")
        assert len({driver["pid"], nodes[WITH]["pid"], nodes[WITHOUT]["pid"]}) == 3

    @DRIVERS
    def test_routes_stay_usable_on_the_nodes_that_have_it(self, seen: dict[str, Any], side: str) -> None:
        """A driver that has no package passes them on without opening them."""
        assert seen[side]["kept"]["value"][:3] == ["ndarray", "int16", VALUES]

    @DRIVERS
    def test_routes_on_the_node_without_it_are_an_error_that_names_the_module(
        self, seen: dict[str, Any], side: str
    ) -> None:
        """At once, at the driver: no worker hangs, and none is lost."""
        ways = seen[side]["routes"]
        assert set(ways) == {"by reference", "in a batch"} | ({"by value"} if side == "with" else set())
        for failed in ways.values():
            assert failed["error"] == "RayTaskError(RaySystemError)"
            assert MISSING in failed["message"]
        worker = seen[side]["nodes"][WITHOUT]["value"]
        assert seen[side]["after"]["value"] == ["ndarray", "uint8", VALUES, worker["pid"]]

    def test_a_driver_gets_routes_if_it_has_the_package(self, seen: dict[str, Any]) -> None:
        assert seen["with"]["got"]["value"][:3] == ["ndarray", "int16", VALUES]
        failed = seen["without"]["got"]
        assert failed["error"] == "RaySystemError"
        assert MISSING in failed["message"]

    @DRIVERS
    def test_arrays_travel_between_the_nodes(self, seen: dict[str, Any], side: str) -> None:
        arrays = {way: found["value"][:3] for way, found in seen[side]["arrays"].items()}
        assert len(arrays) == 6
        for way, found in arrays.items():
            assert found == ["ndarray", way.split()[0], VALUES]

    @DRIVERS
    def test_a_function_of_skyrl_s_is_the_worker_s_own(self, seen: dict[str, Any], side: str) -> None:
        """Whatever the driver's is: it travels by name, patched or not."""
        assert {node: found["value"] for node, found in seen[side]["functions"].items()} == {
            WITH: [True, True],
            WITHOUT: [True, False],
        }

    def test_an_error_of_ours_keeps_its_fields_where_the_package_is(self, seen: dict[str, Any]) -> None:
        raised = seen["with"]["raised"]
        assert raised["error"] == "RayTaskError(ReplyError)"
        assert raised["fields"] == ["routed_experts.shape", "[41, 48, 8]", "[42, 48, 8]"]

    @pytest.mark.parametrize(
        ("side", "kind"), [("without", "raised"), ("without", "raised on the way"), ("with", "raised on the way")]
    )
    def test_an_error_of_ours_keeps_its_words_where_the_package_is_not(
        self, seen: dict[str, Any], side: str, kind: str
    ) -> None:
        """Its class is unknown there. What is wrong, and where, is said all the same."""
        raised = seen[side][kind]
        assert "UnserializableException" in raised["error"]
        assert "ReplyError: routed_experts.shape: expected [41, 48, 8], got [42, 48, 8] (sample 3)" in raised["message"]

    def test_a_setup_hook_for_all_workers_fails_on_the_node_without_it(self, seen: dict[str, Any]) -> None:
        """``worker_process_setup_hook`` is for clusters that have the package everywhere. Ray says which is missing."""
        assert isinstance(seen["hook"][WITH]["value"], int)
        died = seen["hook"][WITHOUT]
        assert died["error"] == "ActorDiedError"
        assert "skyrl_r3.enable" in died["message"]
        assert MISSING in died["message"]
