"""`scripts/mutation`: small mistakes of a file, each of them one, none in words for people."""

import ast
from pathlib import Path

from mutation.__main__ import test_of as found_in
from mutation.__main__ import unknown_of
from mutation.changes import mutants_of

SOURCE = '''
LIMIT = 3

def first(values: "list[int]", *, strict: bool = True) -> int:
    """1 + 1."""
    if not values or strict and len(values) < LIMIT:
        _log.warning("%d of 3", 1 - 1)
        raise ValueError(f"{1 + 1} < 3")
    for value in values:
        if value is not None and value in (4, 5):
            note(value)
            return min(value + 1, é := 7)
    return -1
'''


def changes() -> list[str]:
    return [f"{mutant.line} {mutant.what}" for mutant in mutants_of("first.py", SOURCE.encode())]


def test_each_operator_number_condition_and_call_once() -> None:
    assert changes() == [
        "2 3 → 4",
        "4 True → False",
        "6 or → and",
        "6 not  → ",
        "6 and → or",
        "6 < → <=",
        "10 and → or",
        "10 is not → is",
        "10 in → not in",
        "10 4 → 5",
        "10 5 → 6",
        "11 note(value) → pass",
        "12 min → max",
        "12 + → -",
        "12 1 → 2",
        "12 7 → 8",
        "13 1 → 2",
    ]


def test_a_mutant_is_one_change_of_a_file_that_compiles_and_names_itself_once() -> None:
    source = SOURCE.encode()
    mutants = list(mutants_of("first.py", source))
    whole = ast.dump(ast.parse(source))
    changed = {ast.dump(ast.parse(mutant.applied(source))) for mutant in mutants}
    assert len(changed) == len({mutant.name for mutant in mutants}) == len(mutants)
    assert whole not in changed
    assert {mutant.within for mutant in mutants} == {"module", "first"}
    # The name tells a mutant from others, and stays as it is where lines before it come or go.
    later = [mutant.name for mutant in mutants_of("first.py", b"\n\n" + source)]
    assert later == [mutant.name for mutant in mutants]


def test_tests_are_named_as_pytest_names_them() -> None:
    """Names that were cut at a parameter's sign were found by nobody, and their mutants were called caught."""
    assert found_in("tests/a.py::test_b[x|y]|run") == "tests/a.py::test_b[x|y]"
    said = "ERROR: not found: /t/tests/a.py::test_b\n(no match in any of [<Module a.py>])\n"
    assert unknown_of(said, Path("/t")) == {"tests/a.py::test_b"}
