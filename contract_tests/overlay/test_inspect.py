"""``skyrl-r3 inspect``: every kind of file, every kind of finding, and whatever bytes there may be."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tracemalloc
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors
from typer.testing import CliRunner, Result

import skyrl_r3
from contract_tests import canned, golden
from contract_tests.child import REPO, Ran, run, run_python
from contract_tests.overlay.server_suite import PROMPT, RESPONSE, asking, engine, post, request
from skyrl_r3 import codec, frame, packed, policy
from skyrl_r3.cli import app
from skyrl_r3.errors import R3Error
from skyrl_r3.inspection import files
from skyrl_r3.inspection.facts import Facts, work_out
from skyrl_r3.inspection.files import read
from skyrl_r3.inspection.heatmap import shares
from skyrl_r3.reply import Reply
from skyrl_r3.spec import RouteSpec

GOLDEN = [(version, case) for version in golden.versions() for case in golden.read(version)]
SPEC = RouteSpec(layers=3, topk=2, num_experts=16, moe_layers=(0, 1, 2))


def routes(rows: int = 12) -> np.ndarray:
    """ids ``[rows, 3, 2]`` of 16 experts, in which the checks find nothing."""
    return canned.routes_of(list(range(rows)))


def reply(ids: np.ndarray | None, **more: Any) -> Reply:
    """Of a prompt of 5 tokens and a response of 8."""
    values: dict[str, Any] = {
        "token_ids": np.arange(8, dtype=np.int32),
        "finish_reason": "stop",
        "logprobs": None,
        "routed_experts": ids,
        "prompt_tokens": 5,
        "start": 0,
        "spec": SPEC,
        "model": "org/model",
    }
    return Reply(**values | more)


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def facts(content: bytes, tmp_path: Path, **told: int) -> Facts:
    path = tmp_path / "saved"
    path.write_bytes(content)
    return work_out(read(path), **told)


def inspect(path: Path | str, *options: str) -> Result:
    """The command, which must end as it should whatever it meets."""
    with warnings.catch_warnings(record=True, action="always") as seen:
        result = CliRunner().invoke(app, ["inspect", str(path), *options])
    assert [str(warning.message) for warning in seen] == []  # They would be on stderr.
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def inspected(content: bytes, tmp_path: Path, *options: str, name: str = "saved") -> Result:
    (tmp_path / name).write_bytes(content)
    return inspect(tmp_path / name, *options)


SAVED = str(REPO / "contract_tests/golden/v1/told.frame")
COMMAND = f"{sys.executable} -m skyrl_r3 inspect {SAVED}"


def shell(script: str) -> Ran:
    return run_python(["bash", "-c", script], path=[REPO], env={"PYTHONUNBUFFERED": ""}, check=False)


def words(text: str) -> str:
    return " ".join(text.split())


# What is read


@pytest.mark.parametrize("name", ["frame/1", "packed", "nested", "envelope"])
@pytest.mark.parametrize(("version", "case"), GOLDEN, ids=lambda value: getattr(value, "name", value))
def test_golden_files(version: str, case: golden.Golden, name: str, tmp_path: Path) -> None:
    content = case.envelope if name == "envelope" else case.bodies[name]
    found, expected = facts(content, tmp_path), case.reply
    ids = None if expected.routes is None else np.array(expected.routes)
    if ids is None:
        assert found.saved.ids is None
    else:
        # Of no rows, lists cannot say how wide they are.
        lost = name == "nested" and not len(ids)
        np.testing.assert_array_equal(found.saved.ids, ids.reshape(0, 0, 0) if lost else ids, strict=True)
    assert found.saved.file_bytes == len(content)
    told = expected.metadata if name == "frame/1" else {}
    assert found.spec.num_experts == told.get("num_experts")
    findings = [finding.kind for finding in found.findings]
    assert inspect(tmp_path / "saved").exit_code == (1 if findings else 0)
    if name == "envelope":
        assert (found.saved.reply, found.regions, findings) == (None, None, [])
        return
    assert found.saved.reply is not None
    assert found.saved.reply.token_ids.tolist() == expected.token_ids
    assert found.saved.reply.finish_reason == expected.finish_reason
    assert found.saved.reply.model == told.get("model", "")
    logprobs = found.saved.reply.logprobs
    assert (None if logprobs is None else logprobs.tolist()) == expected.logprobs
    assert found.floored == (expected.logprobs or []).count(-9999.0)
    assert findings == (["missing"] if ids is None else [])
    if ids is not None:
        of_response = max(len(expected.token_ids) - 1, 0)
        of_prompt = len(ids) - of_response
        assert found.regions == (of_prompt, of_response)
        assert found.told == ("prompt_tokens" in told)
        # For the frame that tells a start, the other encodings look like a shorter prompt.
        assert found.prompt == told.get("prompt_tokens", of_prompt if expected.token_ids else None)


def _npy_2(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(2, 0))
    return file.getvalue()


IDS = routes(12)
ARRAYS: dict[str, bytes] = {
    "npy": npy(IDS),
    "npy, int64": npy(IDS.astype(np.int64)),
    "npy, uint16": npy(IDS.astype(np.uint16)),
    "npy, big-endian": npy(IDS.astype(">i4")),
    "npy, by column": npy(np.asfortranarray(IDS)),
    "npy, version 2": _npy_2(IDS),
    "safetensors": save_tensors({"routed_experts": IDS, "other": IDS[:1]}),
    "safetensors, U16": save_tensors({"some": IDS.astype(np.uint16), "x": np.zeros((2, 2, 2), np.float32)}),
    "safetensors, U32": save_tensors({"some": IDS.astype(np.uint32), "x": np.zeros(2, np.int64)}),
    "safetensors, I16": save_tensors({"some": IDS.astype(np.int16), "x": np.zeros(2, np.int64)}),
    "safetensors, I64": save_tensors({"routed_experts": IDS.astype(np.int64)}, {"format": "pt"}),
    "envelope": orjson.dumps(codec.pack(IDS)),
    "nested lists": b" \n" + orjson.dumps(IDS.tolist()),
}


@pytest.mark.parametrize("content", ARRAYS.values(), ids=ARRAYS)
def test_routes_alone(content: bytes, tmp_path: Path) -> None:
    found = facts(content, tmp_path)
    np.testing.assert_array_equal(found.saved.ids, IDS, strict=True)
    assert (found.regions, found.prompt, found.findings, found.num_experts) == (None, None, [], 16)
    found = facts(content, tmp_path, prompt=5, start=1, num_experts=20)
    assert (found.regions, found.findings, found.num_experts) == ((4, 8), [], 20)


def test_routes_of_a_sample_as_a_generator_has_them(tmp_path: Path) -> None:
    sample = skyrl_r3.RoutedExperts(IDS, np.arange(12, dtype=np.int32))
    np.testing.assert_array_equal(facts(npy(sample), tmp_path).saved.ids, IDS, strict=True)


@pytest.mark.parametrize("wanted", ["frame/1", "packed", None])
async def test_the_body_of_a_real_server(wanted: str | None, tmp_path: Path) -> None:
    """SkyRL's own handler; without a wish it answers in nested lists."""
    skyrl_r3.enable()
    try:
        body = request() if wanted is None else asking(wanted)
        response = await post(canned.skyrl_app(engine([[(token, -0.5)] for token in RESPONSE])), body)
    finally:
        skyrl_r3.disable()
    found = facts(response.content, tmp_path)
    ids = canned.routes_of([*PROMPT, *RESPONSE][:-1])
    np.testing.assert_array_equal(found.saved.ids, ids, strict=True)
    assert (found.prompt, found.regions, found.findings) == (5, (5, 2), [])
    assert found.told == (wanted == "frame/1")


# What is printed


def test_everything_is_told_of_a_frame(tmp_path: Path) -> None:
    logprobs = np.array([-0.5] * 6 + [-9999.0] * 2, np.float32)
    ids = routes(10)
    ids[:, 1] = 0
    spec = replace(SPEC, moe_layers=(0, 2))
    content = frame.dump(reply(ids, logprobs=logprobs, start=2, spec=spec))
    result = inspected(content, tmp_path)
    assert result.exit_code == 0
    text = words(result.stdout)
    for expected in (
        "a reply, frame/1",
        f"file {len(content)} bytes",
        "routes [10, 3, 2] rows, layers, top-k; uint8; 60 bytes",
        "rows 3 of the prompt, 7 of the response",
        "prompt 5 tokens, rows from token 2 on",
        "response 8 tokens, finish_reason stop",
        "logprobs 8, 2 of them floored (-9999.0)",
        "model org/model: 3 layers, 16 experts, top-2, layers that route: 0,2",
        "Even would be 12.50% of the tokens, 1.25 picks. With so few, chance makes them uneven.",
        "1 of 3 layers without a route: 1.",
        "All checks passed.",
    ):
        assert expected in text
    assert "Not checked" not in text
    assert "worked out" not in text


def test_what_json_does_not_tell_is_worked_out_and_said(tmp_path: Path) -> None:
    result = inspected(packed.dump(reply(IDS)), tmp_path)
    text = words(result.stdout)
    assert "prompt 5 tokens, worked out from the rows, if they begin at token 0" in text
    for option in ("--prompt-tokens N", "--num-experts E"):
        assert option in text
    assert "All checks passed; 3 could not be made." in text
    text = words(inspected(packed.dump(reply(IDS)), tmp_path, "--prompt-tokens", "5", "--num-experts", "16").stdout)
    assert "prompt 5 tokens response" in text
    assert "Load of 16 experts. Even" in text
    assert "--" not in text


def test_the_load_of_each_layer(tmp_path: Path) -> None:
    ids = np.zeros((4, 3, 2), np.uint8)
    ids[:, 0] = [[0, 1], [1, 2], [1, 3], [1, 0]]
    ids[:3, 2] = [[7, 0], [0, 7], [5, 7]]  # And one row that is all zero.
    found = facts(npy(ids), tmp_path, num_experts=8)
    first, dense, last = found.loads
    assert (first.experts.tolist(), first.picks.tolist(), first.rows, first.note) == ([0, 1, 2, 3], [2, 4, 1, 1], 4, "")
    assert (first.busiest, first.share, first.over_mean(8)) == (1, 1.0, 4.0)
    assert (dense.rows, dense.experts.tolist()) == (0, [])
    assert dense.note == "all zero: dense, or nothing captured"
    assert (last.experts.tolist(), last.picks.tolist(), last.rows) == ([0, 5, 7], [2, 1, 3], 3)
    assert last.note == "1 rows are all zero"
    lines = [
        re.split(r"\s*│\s*", line) for line in inspect(tmp_path / "saved", "--num-experts", "8").stdout.split("\n")
    ]
    rows = [line[1:-1] for line in lines if len(line) > 2 and line[1].isdigit()]
    assert rows == [
        ["0", "4 of 8", "1", "100.0%", "4.00", ""],
        ["1", "", "", "", "", "all zero: dense, or nothing captured"],
        ["2", "3 of 8", "7", "100.0%", "4.00", "1 rows are all zero"],
    ]


def test_what_the_model_is_told_to_be_decides_which_layers_are_dense(tmp_path: Path) -> None:
    ids = routes()
    ids[:, :2] = 0
    found = facts(frame.dump(reply(ids, spec=replace(SPEC, moe_layers=(1, 2)))), tmp_path)
    assert [load.note for load in found.loads] == ["dense", "all zero: nothing captured", ""]
    found = facts(frame.dump(reply(routes(), spec=replace(SPEC, moe_layers=(1, 2)))), tmp_path)
    assert [load.note for load in found.loads] == ["routes, and is dense in the model", "", ""]


def test_a_single_zero_is_a_route(tmp_path: Path) -> None:
    ids = np.array([[[0], [0]], [[1], [0]]], np.uint8)
    first, second = facts(npy(ids), tmp_path).loads
    assert (first.experts.tolist(), first.picks.tolist(), first.rows) == ([0, 1], [1, 1], 2)
    assert len(second.experts) == 0


def test_an_id_that_is_one_too_large_is_no_load(tmp_path: Path) -> None:
    ids = np.array([[[7, 8]], [[6, 8]]], np.uint8)
    (load,) = facts(npy(ids), tmp_path, num_experts=8).loads
    assert (load.experts.tolist(), load.picks.tolist()) == ([6, 7], [1, 1])


def test_61_layers_take_a_line_each(tmp_path: Path) -> None:
    ids = canned.routes_of(list(range(40)), layers=61, topk=8, experts=256)
    lines = inspected(npy(ids), tmp_path, "--num-experts", "256").stdout.splitlines()
    assert [int(line.split()[1]) for line in lines if re.match(r"│ +\d", line)] == list(range(61))
    assert max(map(len, lines)) <= 120


def test_what_a_file_says_does_not_reach_the_terminal_as_a_command(tmp_path: Path) -> None:
    content = frame.dump(reply(IDS, model="[bold]a\x1b[2J\u202e\n", finish_reason="\x07"))
    text = inspected(content, tmp_path, name="[red]\x1b.frame").stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)
    assert r"[bold]a\x1b[2J\u202e\n:" in text
    assert r"[red]\x1b.frame: a reply" in text


def test_whoever_reads_one_line_does_not_change_the_exit_status() -> None:
    """As ``inspect … | head -1`` does, be it that the first line is read before the last is written, or not at all."""
    for reader in ("head -1", "true"):
        ran = shell(f"{COMMAND} | ({reader}; sleep 1); exit ${{PIPESTATUS[0]}}")
        assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == ""
    ran = shell(f"{COMMAND} --num-experts 2 | true; exit ${{PIPESTATUS[0]}}")
    assert (ran.returncode, ran.stderr) == (1, "")  # The verdict.


def test_an_output_that_cannot_be_written_to_is_not_the_files_fault() -> None:
    ran = shell(f"{COMMAND} >/dev/full")
    assert ran.returncode == 1
    assert ran.stderr.startswith("skyrl-r3: cannot write to stdout: No space left on device")
    assert ran.stderr.count("\n") == 1
    assert "told.frame" not in ran.stderr


def test_a_closed_output_is_as_good_as_none() -> None:
    for options, status in (("", 0), (" --num-experts 2", 1)):
        ran = shell(f"{COMMAND}{options} >&-")
        assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", "")


def test_a_file_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "saved").open("wb") as file:
        file.write(b"{")
        file.truncate(2**31)  # It takes no room on the disk.
    ran = shell(f"ulimit -v 4000000; {COMMAND.replace(SAVED, str(tmp_path / 'saved'))}")
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "file: expected one that fits into memory, got 2,147,483,648 bytes" in ran.stderr


# What is found


def _same(ids: np.ndarray) -> np.ndarray:
    ids[:] = ids[:1]
    return ids


def _broken() -> bytes:
    return orjson.dumps({"choices": [{"token_ids": [1], "finish_reason": "stop", "routed_experts": [[[-1]]]}]})


FINDINGS: dict[str, tuple[bytes, list[str]]] = {
    "missing": (frame.dump(reply(None)), []),
    "broken": (_broken(), []),
    "prompt": (frame.dump(reply(routes())), ["--prompt-tokens", "6"]),
    "rows": (frame.dump(reply(routes(11))), []),
    "shape": (frame.dump(reply(routes(), spec=replace(SPEC, layers=4))), []),
    "out_of_range": (frame.dump(reply(routes(), spec=replace(SPEC, num_experts=15))), []),
    "all_equal": (frame.dump(reply(np.full((12, 3, 2), 5, np.uint8))), []),
    "repeated": (frame.dump(reply(np.tile(np.array([1, 2, 1], np.uint8), (12, 3, 1)), spec=RouteSpec())), []),
    "identical_rows": (frame.dump(reply(_same(routes(32)), token_ids=np.arange(28, dtype=np.int32))), []),
}
UNSEEN = {"changed"}  # It takes two replies.


def test_no_kind_is_forgotten() -> None:
    assert set(FINDINGS) | UNSEEN == set(policy.ACTIONS)


@pytest.mark.parametrize("kind", FINDINGS)
def test_findings(kind: str, tmp_path: Path) -> None:
    content, options = FINDINGS[kind]
    result = inspected(content, tmp_path, *options)
    assert result.exit_code == (1 if policy.DEFAULTS[kind] == "error" else 0)
    (row,) = [line for line in result.stdout.splitlines() if line.startswith(f"│ {kind} ")]
    assert row.split("│")[2].strip() == policy.DEFAULTS[kind]
    assert kind in result.stdout.splitlines()[-1]
    (tmp_path / "saved").write_bytes(content)
    told = {"prompt": int(options[1])} if options else {}
    (found,) = work_out(read(tmp_path / "saved"), **told).findings
    assert found.kind == kind


def test_all_findings_are_told_at_once(tmp_path: Path) -> None:
    ids = routes()
    ids[3:, 1] = 5
    ids[0, 2] = 200
    found = facts(frame.dump(reply(ids)), tmp_path)
    assert [finding.kind for finding in found.findings] == ["out_of_range", "all_equal"]
    out_of_range, all_equal = found.findings
    assert out_of_range.where == "row 0, 1 of 12 rows, of the prompt, in layer 2"
    # Row 0 of layer 2 has the same id twice, too.
    assert all_equal.where == "row 0, 10 of 12 rows, of the prompt and response, in layers 1 to 2"
    assert 200 not in found.loads[2].experts


def test_where_the_regions_are_unknown_none_is_named(tmp_path: Path) -> None:
    ids = routes()
    ids[3:, 1] = 5
    (finding,) = facts(npy(ids), tmp_path).findings
    assert finding.where == "row 3, 9 of 12 rows, in layer 1"
    (finding,) = facts(npy(ids), tmp_path, prompt=7).findings
    assert finding.where == "row 3, 9 of 12 rows, of the prompt and response, in layer 1"
    (finding,) = facts(npy(ids), tmp_path, prompt=9, start=6).findings
    assert finding.where == "row 9, 9 of 12 rows, of the response, in layer 1"
    ids[:, 1] = 5
    (finding,) = facts(npy(ids), tmp_path, prompt=9, start=6).findings
    assert finding.where == "row 6, 12 of 12 rows, of the prompt and response, in layer 1"


@pytest.mark.parametrize(
    ("told", "kinds", "regions", "start"),
    [
        ({}, [], (5, 7), 0),
        ({"prompt": 5}, [], (5, 7), 0),
        ({"prompt": 6}, ["rows"], None, 0),
        ({"prompt": 6, "start": 1}, [], (5, 7), 1),
        ({"prompt": 5, "start": 1}, [], (5, 7), 0),  # An engine that knows no start gives all rows.
    ],
)
def test_rows_of_a_reply_that_does_not_tell(
    told: dict[str, int], kinds: list[str], regions: tuple[int, int] | None, start: int, tmp_path: Path
) -> None:
    found = facts(packed.dump(reply(IDS)), tmp_path, **told)
    assert ([finding.kind for finding in found.findings], found.regions, found.start) == (kinds, regions, start)


def test_fewer_rows_than_the_response_needs(tmp_path: Path) -> None:
    (finding,) = facts(packed.dump(reply(routes(6))), tmp_path).findings
    assert (finding.kind, finding.expected, finding.got) == ("rows", "at least 7 rows for 8 tokens", "6 rows")
    assert facts(packed.dump(reply(routes(7))), tmp_path).regions == (0, 7)


def test_fewer_rows_than_the_prompt_has(tmp_path: Path) -> None:
    (finding,) = facts(npy(IDS), tmp_path, prompt=15, start=2).findings
    assert (finding.kind, finding.got) == ("rows", "12 rows")
    assert finding.expected == "at least 13 rows from prompt 15 - start 2"


def test_an_aborted_reply_is_not_checked(tmp_path: Path) -> None:
    """As in the client: nothing is trained with it."""
    none = np.zeros(0, np.int32)
    found = facts(frame.dump(reply(np.zeros((3, 3, 2), np.uint8), token_ids=none)), tmp_path)
    assert (found.findings, found.regions) == ([], (3, 0))
    assert any("no response" in text for text in found.unchecked)


def test_more_layers_than_any_model_has(tmp_path: Path) -> None:
    found = facts(npy(np.zeros((1, 2**20, 2), np.uint8)), tmp_path)
    (finding,) = found.findings
    assert (finding.kind, finding.expected) == ("shape", "at most 4096 layers")
    assert found.loads == []


def test_a_row_of_one_expert_can_repeat_none(tmp_path: Path) -> None:
    text = "that the experts of a row differ: it has one"
    assert text in facts(npy(IDS[:, :, :1]), tmp_path).unchecked
    assert text not in facts(npy(IDS), tmp_path).unchecked


# What cannot be read


def _zip() -> bytes:
    file = io.BytesIO()
    np.savez(file, IDS)
    return file.getvalue()


def _claim(shape: Any, dtype: str = "|u1") -> bytes:
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _tensor_claim(shape: list[int], end: int) -> bytes:
    text = json.dumps({"routed_experts": {"dtype": "U8", "shape": shape, "data_offsets": [0, end]}}).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = frame.dump(reply(IDS))
BROKEN: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "file", "an empty file"),
    "white space": (b"  \n", "file", "(3 bytes)"),
    "text": (b"Internal Server Error", "file", "b'Internal Server Error' (21 bytes)"),
    "UTF-16": ("{}".encode("utf-16"), "file", "b'\\xff\\xfe{\\x00}\\x00'"),
    "npz": (_zip(), "file", "save one array with numpy.save"),
    "pickle": (npy(np.array([{}], dtype=object), allow_pickle=True), "npy.routed_experts", "object array [1]"),
    "bare pickle": (b"\x80\x04\x95", "file", "not opened"),
    "headers": (b"HTTP/1.1 200 OK\r\n\r\n" + GOOD, "file", "without -i"),
    "ELF": (b"\x7fELF\x02\x01\x01" + bytes(60), "file", "ELF"),
    "npy, a batch": (npy(IDS[None]), "npy.routed_experts", "Save one sample"),
    "npy, floats": (npy(IDS.astype(float)), "npy.routed_experts", "float64 array [12, 3, 2]"),
    "npy, cut off": (npy(IDS)[:-1], "npy.routed_experts", "71 bytes"),
    "npy, too long": (npy(IDS) + b"\x00", "npy.routed_experts", "73 bytes"),
    "npy, negative": (npy(-IDS.astype(np.int16)), "routed_experts", "expected ids of 0 or more"),
    "npy, too large": (npy(IDS + np.uint64(2**31)), "routed_experts", "expected ids from 0 to 2147483647"),
    "npy, magic alone": (b"\x93NUMPY", "npy", "ValueError"),
    "npy, version 9": (b"\x93NUMPY\x09\x00" + bytes(100), "npy", "expected a header"),
    "npy, header of 4 GB": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "npy", "expected a header"),
    "npy, parentheses": (b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10_000, "npy", "expected a header"),
    "npy, escapes": (b"\x93NUMPY\x01\x00\x06\x00'\\d\\q'", "npy", "expected a header"),
    "npy, huge": (_claim((2**40, 48, 8)), "npy.routed_experts.shape", f"at most {2**31} ids"),
    "npy, huge and empty": (_claim((0, 2**60, 2**60)), "npy.routed_experts.shape", f"at most {2**31} ids"),
    "npy, 2 GB": (_claim((2**20, 2**8, 8), "<i8"), "npy.routed_experts", "0 bytes"),
    "npy, truths for sizes": (_claim((True, True, True)) + b"\x00", "npy.routed_experts", "[True, True, True]"),
    "npy, negative size": (_claim((-1, 1, -1)), "npy.routed_experts", "[-1, 1, -1]"),
    "frame, cut off": (GOOD[:-1], "routed_experts.data_offsets", "begin"),
    "frame, cut off in its header": (GOOD[:40], "frame", "in a body of 40 bytes"),
    "frame, version 2": (GOOD.replace(b"skyrl-r3/1", b"skyrl-r3/2"), "__metadata__.format", "skyrl-r3/2"),
    "safetensors, none fits": (save_tensors({"a": IDS.astype(np.float32)}), "safetensors", "0 such of 1 tensors"),
    "safetensors, two fit": (save_tensors({"a": IDS, "b": IDS}), "safetensors", "2 such of 2 tensors"),
    "safetensors, no routes": (save_tensors({"routed_experts": IDS[0]}), "routed_experts", "uint8 array [3, 2]"),
    "safetensors, cut off": (save_tensors({"a": IDS})[:-1], "safetensors", "SafetensorError"),
    "safetensors, huge": (_tensor_claim([2**40, 48, 8], 2**40 * 384), "safetensors", "SafetensorError"),
    "JSON, cut off": (packed.dump(reply(IDS))[:-5], "reply", "expected JSON"),
    "JSON, an error": (b'{"error": {"message": "no such model"}}', "choices", "no such model"),
    "JSON, deep": (b"[" * 100_000, "reply", "expected JSON"),
    "JSON, ragged": (b"[[[1, 2], [3]]]", "routed_experts", "ragged"),
    "JSON, bytes that are no UTF-8": (b'{"choices": "\xff"}', "reply", "expected JSON"),
    "JSON, no null": (b"nothing", "reply", "expected JSON"),
    "envelope, huge": (
        b'{"data": "", "shape": [1099511627776, 48, 8], "dtype": "uint8"}',
        "routed_experts.shape",
        "at most",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_get_one_clear_line(name: str, tmp_path: Path) -> None:
    content, field, text = BROKEN[name]
    tracemalloc.start()
    try:
        result = inspected(content, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(f"skyrl-r3 inspect: {tmp_path / 'saved'}: {field}: expected ")
    assert text in result.stderr
    assert len(result.stderr) < 1000
    assert peak < 50_000_000


def test_json_that_is_longer_than_any_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = ARRAYS["envelope"]
    monkeypatch.setattr(files, "_JSON_BYTES", len(content))
    assert facts(content, tmp_path).saved.ids is not None
    result = inspected(content + b" ", tmp_path)
    assert result.exit_code == 1
    assert f"file: expected at most {len(content)} bytes of JSON, got {len(content) + 1} bytes" in result.stderr


def test_a_document_of_safetensors_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = inspected(ARRAYS["safetensors"], tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "pip install safetensors" in result.stderr
    assert inspected(GOOD, tmp_path).exit_code == 0  # A frame does without.


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, os.mkfifo], ids=["missing", "folder", "fifo"])
def test_no_such_file_is_a_wrong_call(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with ExitStack() as held:
        make(path)
        if path.is_fifo():
            # Somebody has it open, or a command that opened it would wait for ever, and not just fail.
            held.callback(os.close, os.open(path, os.O_RDWR))
        result = inspect(path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--prompt-tokens", "0"],
        ["--prompt-tokens", "5", "--start", "6"],
        ["--start", "-1"],
        ["--num-experts", "0"],
        ["--num-experts", "many"],
        ["--heatmap", "no/folder.png"],
        ["--heatmap", "picture.jpg"],
        ["--other"],
    ],
    ids=" ".join,
)
def test_wrong_options(options: list[str], tmp_path: Path) -> None:
    result = inspected(GOOD, tmp_path, *options)
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_file_name_that_is_no_utf_8(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    for content, status in ((GOOD, 0), (b"?", 1)):
        with open(path, "wb") as file:
            file.write(content)
        result = inspect(os.fsdecode(path))
        assert result.exit_code == status
        assert r"caf\udce9: " in (result.stderr if status else result.stdout)


SEEDS = [GOOD, packed.dump(reply(IDS)), frame.dump(reply(None)), _zip(), *ARRAYS.values()]


@st.composite
def garbled(draw: st.DrawFn) -> bytes:
    """A good file with some of its bytes replaced, left out or doubled, or its end cut off; or bytes as they come."""
    content = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        # Half of them in the header, where they do most.
        at = draw(st.integers(0, min(200, len(content))) | st.integers(0, len(content)))
        length = draw(st.integers(0, 4))
        content[at : at + length] = draw(
            st.binary(max_size=4) | st.sampled_from([b"0", b"9999999999", b"-1", b"[", b'"'])
        )
    return bytes(content[: draw(st.integers(0, len(content)) | st.just(len(content)))])


@given(content=garbled() | st.binary(max_size=300) | st.binary(max_size=60).map(b"\x93NUMPY\x01\x00".__add__))
def test_no_bytes_are_a_traceback(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(content)
    try:
        read(path)
        readable = True
    except R3Error:
        readable = False
    result = inspect(path)
    assert result.exit_code in (0, 1)
    assert bool(result.stdout) is readable
    assert result.stderr.count("\n") == (0 if readable else 1)


# The picture


def test_the_matrix_of_the_picture(tmp_path: Path) -> None:
    ids = np.zeros((4, 3, 2), np.uint8)
    ids[:, 0] = [[0, 1], [1, 2], [1, 3], [1, 0]]
    ids[:3, 2] = [[3, 0], [0, 3], [2, 3]]
    expected = [[0.5, 1, 0.25, 0.25, 0], [np.nan] * 5, [2 / 3, 0, 1 / 3, 1, 0]]
    np.testing.assert_allclose(shares(facts(npy(ids), tmp_path, num_experts=5)), expected)


@pytest.mark.parametrize(
    ("layers", "experts", "size"), [(4, 8, (1050, 600)), (61, 256, (1944, 1350))], ids=["4x8", "61x256"]
)
def test_the_picture(layers: int, experts: int, size: tuple[int, int], tmp_path: Path) -> None:
    """Its pixels: two experts that all tokens pick, the others none, in all layers but the first, which is dense."""
    ids = np.zeros((40, layers, 2), np.uint8)
    ids[:, 1:] = [experts // 2, experts - 1]
    picture = tmp_path / "$load_{.png"
    result = inspected(npy(ids), tmp_path, "--num-experts", str(experts), "--heatmap", str(picture), name="$x_{$ 文")
    assert (result.exit_code, result.stderr) == (0, "")
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).astype(int)
    assert pixels.shape == (size[1], size[0], 3)
    # The ends of viridis, and lightgrey.
    colors = ((68, 1, 84), (253, 231, 37), (211, 211, 211))
    none, all_of_them, grey = (np.array((abs(pixels - color) <= 2).all(axis=2)) for color in colors)
    across = (none | all_of_them)[size[1] // 2]
    left = int(across.argmax())
    width = int(across[left:].argmin())
    picked = np.flatnonzero(all_of_them[size[1] // 2, left : left + width])
    assert set(((picked + 0.5) * experts / width).astype(int).tolist()) == {experts // 2, experts - 1}
    down = none[:, left + width // 4]
    top = int(down.argmax())
    height = int(down[top:].argmin()) / (layers - 1)
    assert width > size[0] / 2
    assert height * layers > size[1] / 2
    dense = grey[round(top - 0.8 * height) : round(top - 0.2 * height), left : left + width]
    assert 0.2 < dense.mean() < 0.95  # Hatched.


@pytest.mark.parametrize("content", [frame.dump(reply(None)), npy(IDS[:0]), npy(np.array([[[2**20]]]))])
def test_nothing_to_draw(content: bytes, tmp_path: Path) -> None:
    result = inspected(content, tmp_path, "--heatmap", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert "heatmap: expected routes" in result.stderr
    assert not (tmp_path / "x.png").exists()


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    result = inspected(GOOD, tmp_path, "--heatmap", str(tmp_path / "x.png"))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "x.png" in result.stderr


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = inspected(b"no reply", tmp_path, "--heatmap", str(tmp_path / "x.png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install 'skyrl-r3[plots]'" in words(result.stderr)  # And nothing of the file, which is not read yet.
    assert "no reply" not in result.stderr


def test_the_command_needs_no_more_than_the_package_depends_on() -> None:
    code = f"""
import sys
sys.modules |= dict.fromkeys(("skyrl", "vllm", "torch", "matplotlib", "safetensors"))
sys.argv = ["skyrl-r3", "inspect", {str(REPO / "contract_tests/golden/v1/told.frame")!r}]
from skyrl_r3.__main__ import main
main()
"""
    assert "stopé" in run(code, env={"PYTHONIOENCODING": "utf-8"}).stdout
    text = run(code, env={"PYTHONIOENCODING": "ascii"}).stdout
    assert text.isascii()
    assert r"finish_reason stop\xe9" in text
