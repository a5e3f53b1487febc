"""The packed codec of SkyRL 0.4.0, in a process of its own: :class:`contract_tests.peer.Peer` starts this script."""

from __future__ import annotations

from typing import Any

from contract_tests.peer import serve, take_stdout


def main() -> None:
    answers = take_stdout()

    import skyrl
    from skyrl.backends.skyrl_train.inference_servers import generate_wire  # pyright: ignore[reportAttributeAccessIssue]

    def load_and_decode(body: bytes) -> Any:
        choice = generate_wire.load_packed_body(body)["choices"][0]
        packed = choice["routed_experts"]
        return None if packed is None else generate_wire.decode_packed_routed_experts(packed)

    def load(body: bytes) -> Any:
        reply = generate_wire.load_packed_body(body)
        packed = reply["choices"][0]["routed_experts"]
        if packed is not None:
            packed["data"] = bytes(packed["data"])
        return reply

    questions = {
        "version": lambda _: skyrl.__version__,
        "pack": generate_wire.pack_routed_experts,
        "decode": generate_wire.decode_packed_routed_experts,
        "load": load,
        "load_and_decode": load_and_decode,
    }
    serve(questions, answers)


if __name__ == "__main__":
    main()
