"""Pytest plugin: the record that a complete run of the GPU tests leaves behind.

``tests/gpu_record.json`` says which sources were tested, with which tests, on what. It is written
here and nowhere else, at the end of a run in which every GPU test (``long`` ones apart) passed.
``test_gpu_record.py`` compares it with the tree on machines that have no GPU.
"""

import ast
import datetime
import hashlib
import io
import json
import re
import subprocess
import sys
import time
import tokenize
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent
PATH = TREE / "tests" / "gpu_record.json"
HOST_SOURCES = tuple(
    f"cukv/{name}.py"
    for name in (
        "_attention_launch",
        "_captures",
        "_cubins",
        "_geometry",
        "_kernels",
        "_plan",
        "_rows",
        "_smem",
        "_sources",
        "_specialisations",
    )
)
COLLECT = ("-m", "pytest", "--collect-only", "-q", "-m", "gpu and not long", "tests")
HOW_TO = (
    "on a machine with a GPU, in the project's root: CUKV_REQUIRE_GPU=1 python3 -m pytest tests"
)

# What was tested: sources without comments and blanks

_C_TOKEN = re.compile(
    r"""(?P<comment> //[^\n]* | /\*.*?\*/ )
      | "(?:\\.|[^"\\\n])*"                      # string
      | \d[\w.']*                                # number, 1'000 included
      | \w+
      | '(?:\\.|[^'\\\n])+'                      # character
      | \.\.\. | <<= | >>= | ->\*? | :: | \+\+ | -- | && | \|\| | << | >> | \#\# | [-+*/%&|^!=<>]=
      | \S""",
    re.VERBOSE | re.DOTALL,
)


def c_code(text):
    """Reduce C++ to its tokens, one a line."""
    return "\n".join(m[0] for m in _C_TOKEN.finditer(text) if m["comment"] is None)


def python_code(text):
    """Reduce Python to its lines of code: no comments, no docstrings, no blank lines.

    Only positions are taken from the parser, so every Python version gives the same text.
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        is_scope = isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        )
        if is_scope and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * (
                first.end_lineno - first.lineno + 1
            )
    return "\n".join(line.rstrip() for line in lines if line.strip())


def digest(tree=None):
    """Hash the code of the kernels and of the host files that decide how they run."""
    tree = tree or TREE
    kernels = hashlib.sha256()
    for path in sorted((tree / "kernels").rglob("*.cu*")):
        code = c_code(path.read_text(encoding="utf-8"))
        kernels.update(f"{path.relative_to(tree).as_posix()}\0{code}\0".encode())
    hashes = {"kernels": kernels.hexdigest()}
    for name in HOST_SOURCES:
        if (tree / name).exists():
            code = python_code((tree / name).read_text(encoding="utf-8"))
            hashes[name] = hashlib.sha256(code.encode()).hexdigest()
    return hashes


# Which tests


def collected_ids():
    """Ids of all GPU tests of the tree, by a collection of its own: same with and without a GPU."""
    run = subprocess.run(
        [sys.executable, *COLLECT], cwd=TREE, capture_output=True, text=True, check=False
    )
    if run.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"collecting the GPU tests failed:\n{run.stdout}{run.stderr}")
    return sorted(line for line in run.stdout.splitlines() if re.match(r"tests/\S+\.py::", line))


def ids_hash(ids):
    """Hash a list of test ids, whatever its order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()


def problems(record, hashes, ids):
    """Say what keeps a record from vouching for sources with these hashes and these tests."""
    found = [
        f"{name} changed since the recorded run"
        for name in sorted({*hashes, *record["digest"]})
        if hashes.get(name) != record["digest"].get(name)
    ]
    if ids_hash(ids) != record["ids"]:
        found.append(f"the GPU tests changed: {record['passed']} were recorded, {len(ids)} exist")
    if record["passed"] != len(ids) or record["failed"] or record["skipped"]:
        counts = ", ".join(f"{record[n]} {n}" for n in ("passed", "failed", "skipped"))
        found.append(f"the recorded run was not complete: {counts} of {len(ids)}")
    return found


# The plugin


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-record",
        type=Path,
        default=PATH,
        metavar="PATH",
        help="where a complete run of the GPU tests writes its record",
    )


class Recorder:
    """Notes the outcome of every GPU test of a run and writes the record of a complete one."""

    def __init__(self, path):
        self.path = path
        self.outcomes = {}  # id -> passed, failed or skipped
        self._start = time.monotonic()
        # Taken now: a file edited while the tests run was not what they ran.
        self._hashes = digest()

    def pytest_runtest_logreport(self, report):
        if "gpu" in report.keywords and "long" not in report.keywords:
            worst = self.outcomes.get(report.nodeid, "passed")
            self.outcomes[report.nodeid] = worst if worst != "passed" else report.outcome

    def pytest_sessionfinish(self, session, exitstatus):
        passed = [i for i, outcome in self.outcomes.items() if outcome == "passed"]
        if exitstatus != pytest.ExitCode.OK or not passed:
            return
        # Not passed: one that failed, was skipped, or was left out by -k, a path or an option.
        if sorted(passed) != collected_ids() or digest() != self._hashes:
            return
        record = {
            "digest": self._hashes,
            "ids": ids_hash(passed),
            "passed": len(passed),
            "failed": 0,
            "skipped": 0,
            "seconds": round(time.monotonic() - self._start, 1),
            **machine(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }
        self.path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nGPU record: {len(passed)} tests, written to {self.path}")


def machine():
    """Describe the GPU and the CUDA that the tests ran with."""
    import cupy as cp
    from cupy_backends.cuda.libs import nvrtc

    runtime = cp.cuda.runtime
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(smi, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "device": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": driver,
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        "cupy": cp.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def pytest_configure(config):
    if not config.option.collectonly and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.option.gpu_record), "gpu_recorder")
