"""The package as a whole: what importing it does, what it exports, how its text is kept."""

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_record import python_code

import cukv
from cukv import _kernels, _sources
from cukv._arrays import is_available

TREE = Path(__file__).parent.parent
SUFFIXES = {".py", ".cu", ".cuh", ".md", ".toml", ".ipynb"}
SOURCES = [
    *(TREE / name for name in ("README.md", "pyproject.toml")),
    *sorted(
        path
        for folder in ("cukv", "kernels", "tests", "notebooks")
        for path in (TREE / folder).rglob("*")
        if path.suffix in SUFFIXES and ".ipynb_checkpoints" not in path.parts
    ),
]
CODE = [path for path in SOURCES if path.suffix in {".py", ".cu", ".cuh"}]
MODULES = sorted(
    ".".join(path.relative_to(TREE).with_suffix("").parts).removesuffix(".__init__")
    for path in (TREE / "cukv").rglob("*.py")
    if path.name != "__main__.py"
)


def relative(path):
    return path.relative_to(TREE).as_posix()


def run_python(code, **environment):
    """Run code in a new process of this Python and give what it prints."""
    env = os.environ | {"PYTHONPATH": str(TREE)} | environment
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


# Importing

IMPORT = """
import sys, time
import cupy
start = time.process_time()  # what it does, not what else the machine does meanwhile
import cukv
print(time.process_time() - start)
print(*(name for name in ("torch", "jax", "flashinfer", "matplotlib") if name in sys.modules))
"""


def test_importing_is_quick_and_brings_no_framework_along():
    printed = [run_python(IMPORT) for _ in range(3)]
    assert all(len(words) == 1 for words in printed), f"imports {printed[0][1:]}"
    assert min(float(words[0]) for words in printed) < 0.4  # CPU seconds beyond CuPy's own


def test_importing_works_where_no_device_is_visible():
    code = "import cukv; print(cukv.is_available())"
    assert run_python(code, CUDA_VISIBLE_DEVICES="") == ["False"]


HOME = """
import os
os.environ.pop("CUPY_CACHE_DIR", None)
import cukv, numpy
folder = os.environ.get("CUPY_CACHE_DIR", "unset")
print(cukv.packbits(numpy.ones(3, bool))[0], folder, os.path.isdir(folder))
"""


def test_importing_works_in_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()  # a folder below a file cannot be made, not even by root
    bits, folder, is_there = run_python(HOME, HOME=str(tmp_path / "file" / "home"))
    assert (bits, is_there) == ("7", "True")
    assert not Path(folder).exists()  # any more


def test_cupy_keeps_a_folder_that_can_be_written(tmp_path):
    assert run_python(HOME, HOME=str(tmp_path)) == ["7", "unset", "False"]
    assert (tmp_path / ".cupy" / "kernel_cache").is_dir()


CONTEXT = """
import ctypes
def state():
    return ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))
import cupy
print(state())
import cukv
print(state())
"""


@pytest.mark.gpu
def test_importing_does_not_initialise_cuda():
    with_cupy, with_cukv = run_python(CONTEXT)
    cuda_error_not_initialized = "3"
    assert with_cukv == with_cupy == cuda_error_not_initialized


# Exports

CONTRACT = {
    *("RaggedTensor", "RaggedMask", "PackedMask", "PageTable", "PagedKVCache", "MLAPagedCache"),
    *("CascadeLevels", "merge_states", "merge_state", "packbits", "segment_packbits"),
    *("batch_indices_positions", "is_available", "warmup", "CudaUnavailableError"),
}


def test_the_public_names_are_those_of_the_contract_and_nothing_slips_in():
    assert set(cukv.__all__) >= CONTRACT
    assert cukv.__all__ == sorted(cukv.__all__)
    visible = {n for n, v in vars(cukv).items() if n[0] != "_" and not inspect.ismodule(v)}
    assert visible == set(cukv.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", cukv.__version__)


def public_callables():
    """Give (qualified name, callable) of everything public: functions, classes, their methods."""
    for thing in (getattr(cukv, name) for name in cukv.__all__):
        yield thing.__qualname__, thing
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for name in dir(thing):
                raw = inspect.getattr_static(thing, name)
                function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
                if name[0] != "_" and inspect.isfunction(function):
                    yield f"{thing.__qualname__}.{name}", function


CALLABLES = dict(public_callables())


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_callable_says_what_it_takes_and_gives(name):
    thing = CALLABLES[name]
    doc = inspect.getdoc(thing)
    assert doc, "no docstring"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    signature = inspect.signature(thing)
    parameters = [p for p in signature.parameters if p not in ("self", "cls")]
    if "Plan" in name.split("."):  # made by nouns, not by users
        parameters = [] if name == "Plan" else parameters
    if parameters:
        assert "Parameters\n----------" in doc, f"does not describe {parameters}"
        described = doc.split("Parameters\n----------")[1].split("\n\n")
        heads = [line for part in described for line in part.splitlines() if line[:1].strip()]
        named = set(re.findall(r"\w+", " ".join(head.split(":")[0] for head in heads)))
        left = [p for p in parameters if p not in named]
        assert not left, f"does not describe {left}"
    returned = signature.return_annotation
    if not inspect.isclass(thing) and parameters and returned not in (None, "None", "Self"):
        constructor = returned == name.partition(".")[0]
        assert constructor or "Returns\n-------" in doc, f"does not say it returns {returned}"


# What works on arrays with a kernel: its docstring says which.
VERBS = {
    *("append", "gather", "copy_pages", "plan", "decode", "prefill", "attend"),
    *("from_seq_lens", "from_block_table", "block_table", "slot_mapping", "seq_lens"),
    *("token_indptr", "pack", "packbits", "segment_packbits", "merge_state"),
    *("merge_states", "batch_indices_positions"),
}


def section(doc, title):
    """Give the entries of a section of a docstring as (heading, description), or None."""
    found = re.search(rf"^{title}\n-+\n(.*?)(?=\n\n\w+\n---|\Z)", doc, re.MULTILINE | re.DOTALL)
    if not found:
        return None
    entries = re.split(r"^(?=\S)", found[1].replace("\\\n", ""), flags=re.MULTILINE)[1:]
    return [entry.partition("\n")[::2] for entry in entries]


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_give_shapes_units_errors_and_source(name):
    thing, doc = CALLABLES[name], inspect.getdoc(CALLABLES[name])
    if inspect.isclass(thing):
        if thing.__module__ not in ("cukv._arrays", "cukv._plan"):
            assert "Layout: FlashInfer" in " ".join(doc.split())
        return
    signature = inspect.signature(thing)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    described = section(doc, "Parameters") or []
    for parameter in parameters:
        entries = [e for e in described if parameter.name in re.findall(r"\w+", e[0].split(":")[0])]
        heading, text = entries[0]
        elsewhere = re.search(r"\b[Aa]s (in|``)", text)
        if "Array" in str(parameter.annotation):
            assert "[" in heading + text or elsewhere, f"no shape of {heading}"
        if "indptr" in parameter.name:
            units = r"\b(rows|tokens|pages|elements|bytes)\b"
            assert re.search(units, text) or elsewhere, f"no unit of {heading}"
    if parameters:
        assert section(doc, "Raises"), "no errors"
    returned = str(signature.return_annotation)
    if "Array" in returned:
        found = section(doc, "Returns")
        assert "[" in (str(found) if found else doc), "no shape of what it gives"
    if name.rpartition(".")[2] in VERBS:
        source = re.search(r"Source: (as ``\w+``|[\w/., ]+)\.(?:\s|$)", doc.replace("\n", " "))
        assert source or "until the kernel exists" in doc, "no source"
        for path in re.findall(r"\S+\.(?:cu|py)\b", source[0] if source else ""):
            assert (TREE / path).exists(), path


# Examples


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    if name.startswith("cukv.jax"):
        pytest.importorskip("jax")
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def readme_code():
    """Give the Python of README.md, on NumPy where there is no GPU."""
    text = (TREE / "README.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert "import cupy as xp" in code
    return code if is_available() else code.replace("import cupy as xp", "import numpy as xp")


def test_the_example_in_the_readme_runs():
    exec(compile(readme_code(), "README.md", "exec"), {})


def test_the_kernels_readme_has_a_line_for_every_kernel_and_every_header():
    text = (TREE / "kernels" / "README.md").read_text(encoding="utf-8")
    by_name = text.partition("## Kernels by name")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", by_name, re.MULTILINE)) == sorted(
        _kernels.specialisations()
    )
    headers = [path.relative_to(_sources.ROOT).as_posix() for path in _sources.ROOT.rglob("*.cuh")]
    assert sorted(re.findall(r"^\| `(common/\S+)` \|", text, re.MULTILINE)) == sorted(headers)


# Text

MACHINE = re.compile(r"/(?:work|root|home|tmp|Users)/\w")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
# What a reader of the tree cannot look up: trackers, and whoever or whatever wrote a line.
ELSEWHERE = re.compile(
    r"\b(?:issues? #?\d+|GH-\d+|Co-authored|chat" + r"bot|ChatGPT)\b", re.IGNORECASE
)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_text_needs_nothing_from_outside_the_tree(path):
    text = path.read_text(encoding="utf-8")
    for pattern in (MACHINE, UNFINISHED, ELSEWHERE):
        found = [] if path == Path(__file__) else pattern.findall(text)
        assert not found
    assert "\t" not in text
    assert "\r" not in text
    if path.suffix in {".cu", ".cuh"}:  # clang-format leaves comments as they are
        assert not [line for line in text.splitlines() if len(line) > 100]


@pytest.mark.parametrize(
    "path", [path for path in CODE if "tests" not in path.relative_to(TREE).parts], ids=relative
)
def test_a_file_is_short_enough_to_read(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":  # docstrings are the manual, not the code
        text = python_code(text)
    assert len(text.splitlines()) <= 400


def test_a_definition_is_at_most_thirty_lines():
    tree = ast.parse((TREE / "cukv" / "reference.py").read_text(encoding="utf-8"))
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lines = body[-1].end_lineno - body[0].lineno + 1
            assert lines <= 30, f"{function.name} has {lines}"


@pytest.mark.parametrize("path", sorted((TREE / "cukv").rglob("*.py")), ids=relative)
def test_frameworks_are_imported_where_they_are_served_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        )
    }
    assert not imported & {"torch", "flashinfer"}
    assert "jax" not in imported or path.parent.name == "jax"
    if path.name == "reference.py":
        assert imported <= {"__future__", "collections", "itertools", "math", "numpy", "typing"}


@pytest.mark.skipif(not (TREE / ".git").exists(), reason="not a checkout")
def test_the_top_level_holds_what_the_structure_says():
    git = ["git", "ls-files", "-co", "--exclude-standard"]
    files = subprocess.run(git, cwd=TREE, capture_output=True, text=True, check=True).stdout
    top = {name.partition("/")[0] for name in files.splitlines()}
    known = {"pyproject.toml", "cukv", "kernels", "tests", "notebooks", "README.md"}
    assert not {name for name in top if not name.startswith(".")} - known


def test_the_licence_is_the_whole_apache_licence():
    text = (TREE / "cukv" / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
