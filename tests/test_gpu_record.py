"""The record of the last complete GPU run must belong to the sources and tests of this tree."""

import json
import shutil

import gpu_record
import pytest
from gpu_record import c_code, digest, ids_hash, problems, python_code

from cukv._arrays import is_available

pytest_plugins = ["pytester"]


@pytest.mark.skipif(is_available(), reason="with a GPU the run writes the record itself")
def test_the_gpu_record_belongs_to_these_sources_and_tests():
    assert gpu_record.PATH.exists(), f"tests/gpu_record.json is missing; {gpu_record.HOW_TO}"
    record = json.loads(gpu_record.PATH.read_text(encoding="utf-8"))
    found = problems(record, digest(), gpu_record.collected_ids())
    assert not found, f"{'; '.join(found)}; make a new record: {gpu_record.HOW_TO}"


# The digest

KERNEL = """// add -- sums.
__global__ void add(const char* s, int n) {
    /* two
       lines */ asm("// not a comment");
    int i = n / 1'000 + '"' + '\\'';  // tail
}
"""


@pytest.mark.parametrize(
    "other",
    [
        KERNEL.replace("// add -- sums.", "// add -- sums rows."),
        KERNEL.replace("// tail", ""),
        KERNEL.replace("/* two\n       lines */", ""),
        KERNEL.replace("\n    ", "\n\n\t"),
        KERNEL.replace("add(const char* s, int n)", "add(\n    const char * s,\n    int n)"),
        KERNEL.replace("\n", "\r\n"),
    ],
)
def test_comments_and_blanks_do_not_change_the_code_of_a_kernel(other):
    assert other != KERNEL
    assert c_code(other) == c_code(KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int n", "intn"),
        ("// not a comment", "// not a  comment"),  # inside a string
        ("1'000", "1'001"),
        ("n / 1", "n * 1"),
        ("+ '\"'", "++ '\"'"),
        ("// add", "add  //"),
    ],
)
def test_a_changed_token_changes_the_code_of_a_kernel(old, new):
    assert old in KERNEL
    assert c_code(KERNEL.replace(old, new)) != c_code(KERNEL)


MODULE = '''"""About.

Two paragraphs.
"""

LIMIT = 3  # pages


class Pool:
    """A pool."""

    def take(self):
        """Take one."""
        if self:  # first come
            return None
        return f"{self} # not a comment", """not a docstring"""
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Two paragraphs.", "Three\nparagraphs."),
        ("  # pages", ""),
        ("A pool.", "A pool of pages."),
        ("# first come", "# first come, first served"),
        ('        """Take one."""\n', ""),
        ("\n\n\n", "\n"),
    ],
)
def test_comments_and_docstrings_do_not_change_the_code_of_a_module(old, new):
    assert old in MODULE
    assert python_code(MODULE.replace(old, new)) == python_code(MODULE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("} # not", "} #not"),
        ("not a docstring", "not the docstring"),
        ("        return", "        yield"),
        ("            return None", "          return None"),
    ],
)
def test_changed_code_changes_the_code_of_a_module(old, new):
    assert old in MODULE
    assert python_code(MODULE.replace(old, new)) != python_code(MODULE)


@pytest.mark.parametrize("name", ["kernels/common/types.cuh", "kernels/a.cu", "cukv/_kernels.py"])
def test_the_digest_sees_every_source_and_names_the_changed_part(name, tmp_path):
    for folder in ("kernels", "cukv"):
        shutil.copytree(gpu_record.TREE / folder, tmp_path / folder)
    assert digest(tmp_path) == digest()
    with (tmp_path / name).open("a") as file:
        file.write("\n\nint x = 1;\n" if name.startswith("kernels") else "\n\nx = 1\n")
    part = "kernels" if name.startswith("kernels") else name
    changed = {n for n, h in digest(tmp_path).items() if digest()[n] != h}
    assert changed == {part}


# The record

IDS = ["tests/test_a.py::test_one", "tests/test_a.py::test_two[0]"]
HASHES = {"kernels": "k", "cukv/_kernels.py": "h"}
RECORD = {"digest": HASHES, "ids": ids_hash(IDS), "passed": 2, "failed": 0, "skipped": 0}


@pytest.mark.parametrize(
    ("record", "hashes", "ids", "word"),
    [
        (RECORD, {**HASHES, "kernels": "other"}, IDS, "kernels changed"),
        (RECORD, {**HASHES, "cukv/_plan.py": "new"}, IDS, "cukv/_plan.py changed"),
        (RECORD, HASHES, [*IDS, "tests/test_b.py::test_three"], "the GPU tests changed"),
        (RECORD, HASHES, [IDS[0], "tests/test_a.py::test_two[1]"], "the GPU tests changed"),
        ({**RECORD, "failed": 1}, HASHES, IDS, "not complete"),
        ({**RECORD, "skipped": 1}, HASHES, IDS, "not complete"),
        ({**RECORD, "passed": 1}, HASHES, IDS, "not complete"),
    ],
)
def test_a_record_of_something_else_is_refused_by_name(record, hashes, ids, word):
    assert any(word in problem for problem in problems(record, hashes, ids))


def test_a_record_of_the_same_thing_is_accepted_in_any_order():
    assert problems(RECORD, HASHES, IDS[::-1]) == []


# The plugin, on a small project of its own whose GPU is pretended

SUITE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 1])
def test_on_gpu(n):
    {body}

@pytest.mark.gpu
@pytest.mark.long
def test_long_on_gpu():
    pass

def test_on_host():
    {host_body}
"""
CONFTEST = """
import pathlib, subprocess, sys
import gpu_record

gpu_record.TREE = pathlib.Path(__file__).parent.parent
gpu_record.machine = lambda: {"device": "pretended"}
pytest_plugins = ["gpu_record"]

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: on a GPU")
    config.addinivalue_line("markers", "long: slow")

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if not item.get_closest_marker("long")]
"""


@pytest.fixture
def run_suite(pytester, monkeypatch):
    """Run a small suite in a process of its own and give the record it wrote, or None."""
    pytester.mkdir("tests")
    pytester.mkdir("kernels")
    monkeypatch.setenv("PYTHONPATH", str(gpu_record.TREE / "tests"))

    def run(*options, body="pass", host_body="pass"):
        tests = pytester.path / "tests"
        (tests / "conftest.py").write_text(CONFTEST)
        (tests / "test_suite.py").write_text(SUITE.format(body=body, host_body=host_body))
        path = tests / "record.json"
        pytester.runpytest_subprocess(f"--gpu-record={path}", *(options or ["tests"]))
        return json.loads(path.read_text()) if path.exists() else None

    return run


def test_a_complete_gpu_run_writes_the_record(run_suite):
    record = run_suite()
    ids = [f"tests/test_suite.py::test_on_gpu[{n}]" for n in (0, 1)]
    assert (record["passed"], record["failed"], record["skipped"]) == (2, 0, 0)
    assert record["ids"] == ids_hash(ids)
    assert record["device"] == "pretended"


@pytest.mark.parametrize(
    "options",
    [
        ["tests", "-k", "0"],
        ["tests", "--deselect=tests/test_suite.py::test_on_gpu[1]"],
        ["tests/test_suite.py::test_on_gpu[0]"],
        ["tests", "--ignore=tests/test_suite.py"],
        ["tests", "--collect-only"],
    ],
    ids=lambda options: options[-1].split("=")[0],
)
def test_a_partial_gpu_run_writes_no_record(run_suite, options):
    assert run_suite(*options) is None


@pytest.mark.parametrize(
    "bodies",
    [
        {"body": "assert n == 0"},
        {"body": "pytest.skip('no reason')"},
        {"body": "n == 0 or pytest.xfail('known')"},
        {"host_body": "assert False"},
        {"body": "open('kernels/new.cu', 'w').write('int x;')"},
    ],
    ids=["failed", "skipped", "xfailed", "failed on the host", "edited meanwhile"],
)
def test_a_gpu_run_that_is_not_wholly_passed_writes_no_record(run_suite, bodies):
    assert run_suite(**bodies) is None
