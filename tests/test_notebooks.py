"""Notebooks: they run top to bottom on both homes, and are stored without what running leaves."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent
NOTEBOOKS = sorted((TREE / "notebooks").glob("*.ipynb"))

# Run code cells as Jupyter does: the value of a cell's last expression is shown. Floats that NumPy
# allocates are infinite until they are written: a sum over some that were not is invalid. All but
# float8_e4m3fn, which has no infinity.
RUN = """
import ast, json, sys, warnings
import numpy

allocate = numpy.empty

def empty(*args, **kwargs):
    array = allocate(*args, **kwargs)
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        array.fill(float("inf"))
    return array

numpy.empty = empty
warnings.filterwarnings("error", "invalid value", RuntimeWarning)
scope = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin)):
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"code cell {number}", "exec"), scope)
    if last is not None:
        value = eval(compile(last, f"code cell {number}", "eval"), scope)
        shown = getattr(value, "_repr_html_", lambda: "")() or ""
        print(number, type(value).__name__, len(shown))
print("home:", scope["xp"].__name__)
"""


def cells(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_top_to_bottom(path, xp):
    text = path.read_text(encoding="utf-8")
    for module in ("jax", "matplotlib"):
        if f"import {module}" in text and find_spec(module) is None:
            pytest.skip(f"needs {module}")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"} if xp.__name__ == "numpy" else {}
    run = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(cells(path, "code")),
        env=os.environ | {"PYTHONPATH": str(TREE)} | hidden,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith(f"home: {xp.__name__}\n")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        assert cell["source"]
        if cell["cell_type"] == "code":
            assert cell["execution_count"] is None
            assert cell["outputs"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_teaches_and_holds_no_library_code(path):
    first = cells(path, "markdown")[0]
    assert first.startswith("# ")
    for source in cells(path, "code"):
        for node in ast.walk(ast.parse(source)):
            assert not isinstance(node, ast.ClassDef)
            if isinstance(node, ast.FunctionDef):
                assert ast.get_docstring(node)
                assert node.end_lineno - node.lineno < 16


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_between_notebooks_lead_somewhere(path):
    for text in cells(path, "markdown"):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (path.parent / target).exists(), target
