"""On, off and drift on SkyRL 0.4, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

from contract_tests.child import run
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.fake_skyrl import CLIENT, SERVER
from contract_tests.overlay.overlay_suite import ENDPOINTS, RAW, OverlayContract


class TestOverlay(OverlayContract):
    release = "0.4.0"
    client_target = f"{CLIENT}.RemoteGenerateClient.generate"
    client_end = f"""
def client_end(flag):
    request = {{"prompt_token_ids": [1], "sampling_params": {{}}, "session_id": None, "model": "m"}}
    client = {CLIENT}.RemoteGenerateClient()
    return outcome(lambda: client.generate(**request, return_routed_experts=flag))
"""

    def test_switched_off(self, double: Path) -> None:
        ran = run(
            self.import_all + RAW + f"report(on=[patched(raw(*place)) for place in {self.places!r}], states=states())",
            path=[double],
            hook=True,
            env={"SKYRL_R3": "off"},
        )
        assert ran.values["on"] == [False] * len(self.targets)
        assert self.among(ran.values["states"], "pending") == self.targets

    def test_real_modules(self) -> None:
        """Hook, then import: applied with nothing to remark; pickles as ever; off again, and on again."""
        ran = run(
            self.import_all
            + RAW
            + f"""
import pickle, cloudpickle
on, remarks = states(), details()
now = [raw(*place) for place in {self.places!r}]
stock = [getattr(value, "__func__", value).__wrapped__ for value in now]
client = sys.modules[{CLIENT!r}]
def same(value):
    return [pickle.loads(pickle.dumps(value)) is value, cloudpickle.loads(cloudpickle.dumps(value)) is value]
actor = sys.modules[{SERVER!r}].VLLMServerActor
pickles = [same(value) for value in (client.RemoteGenerateClient, client.RemoteInferenceClient, actor)]
parse = cloudpickle.loads(cloudpickle.dumps(client.load_packed_body))
instance = client.RemoteInferenceClient(proxy_url="http://h", server_urls=["http://h"], data_parallel_size=1)
copy = cloudpickle.loads(pickle.dumps(instance))
facts = [inspect.iscoroutinefunction(client.RemoteGenerateClient.generate), copy.proxy_url, parse(b"{{}}"),
         list(inspect.signature(client.RemoteGenerateClient._post).parameters),
         isinstance(inspect.getattr_static(actor, "_add_custom_endpoints"), staticmethod)]
skyrl_r3.disable()
back = [getattr(raw(*place), "__func__", raw(*place)) for place in {self.places!r}]
off = states()
skyrl_r3.enable()
report(on=on, remarks=remarks, pickles=pickles, facts=facts, restored=[a is b for a, b in zip(back, stock)], off=off,
       again=states())
""",
            hook=True,
        )
        values = ran.values
        assert self.among(values["on"], "applied") == self.among(values["again"], "applied") == self.targets
        assert set(values["remarks"].values()) == {""}
        assert values["pickles"] == [[True, True]] * 3
        parameters = ["self", "url", "json", "headers", "packed_side_channels"]
        assert values["facts"] == [True, "http://h", {}, parameters, True]
        assert values["restored"] == [True] * len(self.targets)
        assert self.among(values["off"], "applied") == []

    def test_real_server_that_is_run_as_a_script(self) -> None:
        """``python -m`` of SkyRL's own module, up to its help text: it is patched when its main block runs."""
        ran = run(
            f"""
            import contextlib, io, runpy, sys
            sys.argv = ["server", "--help"]
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    runpy.run_module({SERVER!r}, run_name="__main__", alter_sys=True)
                code = None
            except SystemExit as ended:
                code = ended.code
            report(code=code, state=states()[{ENDPOINTS!r}], remark=details()[{ENDPOINTS!r}])
            """,
            hook=True,
        )
        assert ran.values == {"code": 0, "state": "applied", "remark": ""}

    def test_the_client_alone_is_patched_at_its_import(self) -> None:
        """In a process that runs no server, and imports no vLLM."""
        ran = run(
            f"""
            import {CLIENT}, sys
            report(states=states(), vllm="vllm" in sys.modules, finder=type(sys.meta_path[0]).__name__)
            """,
            hook=True,
        )
        of_client = [name for name in self.targets if name.startswith(CLIENT)]
        assert self.among(ran.values["states"], "applied") == of_client
        assert self.among(ran.values["states"], "pending") == [name for name in self.targets if name not in of_client]
        assert (ran.values["vllm"], ran.values["finder"]) == (False, "SkyRLFinder")

    def test_a_later_0_4_with_the_same_signatures_is_patched(self, tmp_path: Path) -> None:
        folder = fake_skyrl.build(tmp_path, like="0.4.0", version="0.4.3")
        ran = run(f"{self.import_all}\nreport(states=states())", path=[folder], hook=True)
        assert self.among(ran.values["states"], "applied") == self.targets
