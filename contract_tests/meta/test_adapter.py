"""What an adapter says of itself has to be so, and is refused in one line if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract_tests import adapter
from contract_tests.adapter import Quirks, UnknownImplementationError

HEAD = "from contract_tests.adapter import Adapter, Quirks\nfrom contract_tests.implementations import Naive\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads the class ``Mine`` of a module that is written as text."""
    name = f"of_{tmp_path.name}"  # Another one for each test.

    def run(text: str) -> adapter.Adapter:
        (tmp_path / f"{name}.py").write_text(HEAD + text)
        monkeypatch.syspath_prepend(tmp_path)
        return adapter.load(f"{name}:Mine")

    return run


@pytest.mark.parametrize(
    ("quirks", "said"),
    [
        ({"form": "frame/1"}, "form: expected packed or nested, got 'frame/1'"),
        ({"writes": "packed"}, "writes: expected a tuple of nested, packed, frame/1, got 'packed'"),
        ({"reads": ("packed", "frame")}, "reads: expected a tuple"),
        ({"reads": (["packed"],)}, "reads: expected a tuple"),
        ({"trace": True}, "trace: expected whole, deltas or nothing, got True"),
        ({"http": "yes"}, "http: expected a bool"),
        ({"max_bytes": 0}, "max_bytes: expected an int above 0, got 0"),
        ({"max_bytes": 1e9}, "max_bytes: expected an int"),
        ({"lenient": "pad bits"}, "lenient: expected a frozenset of names, got 'pad bits'"),
    ],
)
def test_quirks_are_checked(quirks: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^quirks\.{said}"):
        Quirks(**quirks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quirks = Quirks(writes=('packt',))", "ValueError: quirks.writes: expected a tuple"),
        ("quirks = {'form': 'packed'}", "expected quirks to be Quirks, got {'form': 'packed'}"),
        ("def versions(self): return 'my_codec 1.0'", "expected versions() to be a dict of str, got 'my_codec 1.0'"),
        ("def versions(self): return {'my_codec': 1}", "expected versions() to be a dict of str"),
        ("def versions(self): raise SystemExit(0)", "SystemExit: 0"),
        ("refusals = Exception", "expected refusals to be exceptions narrower than Exception, got <class 'Exception'>"),
        ("refusals = (ValueError, Exception)", "expected refusals to be exceptions narrower than Exception"),
        ("refusals = BaseException", "expected refusals to be exceptions narrower than Exception"),
        ("refusals = 'ValueError'", "expected refusals to be exceptions narrower than Exception, got 'ValueError'"),
        ("refusals = ()", "expected refusals to be exceptions narrower than Exception, got ()"),
        ("def __init__(self): import sys; sys.exit('no codec')", "SystemExit: no codec"),
        ("def __init__(self): import pytest; pytest.skip('no codec')", "Skipped: no codec"),
        ("def __init__(self): import pytest; pytest.exit('no codec', 0)", "Exit: no codec"),
    ],
)
def test_what_an_adapter_says_is_checked(text: str, said: str, load: Any) -> None:
    with pytest.raises(UnknownImplementationError) as raised:
        load(f"class Mine(Naive):\n    {text}\n")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("method", "quirk"),
    [
        ("dump", "writes=('packed',)"),
        ("load", "reads=('packed',)"),
        ("trace", "trace='whole'"),
        ("cut", "cut=True"),
        ("http", "http=True"),
    ],
)
def test_a_claim_without_its_method_is_refused(method: str, quirk: str, load: Any) -> None:
    """Every test of it would otherwise end in NotImplementedError."""
    code = "class Mine(Adapter):\n    encode = Naive.encode\n    decode = Naive.decode\n"
    with pytest.raises(UnknownImplementationError, match=rf"expected an Adapter with {method}\(\)"):
        load(f"{code}    quirks = Quirks({quirk})\n")


@pytest.mark.parametrize("text", ["import sys; sys.exit(0)", "import pytest; pytest.importorskip('no_such_module')"])
def test_a_module_that_ends_everything_is_refused(text: str, load: Any) -> None:
    with pytest.raises(UnknownImplementationError, match=r"SystemExit: 0|Skipped: "):
        load(text)


def test_one_implementation_has_one_name() -> None:
    for name, path in adapter.NAMES.items():
        assert adapter.short(path) == adapter.short(name) == name
    assert adapter.load("contract_tests.implementations:Naive").name == "naive"
