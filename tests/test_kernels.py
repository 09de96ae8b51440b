"""Every kernel compiles for every architecture without stack or spills, and keeps its contract.

Nothing here needs a GPU; NVRTC makes machine code for any of them. A missing NVRTC is a failure.
"""

import dataclasses
import functools
import importlib
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from cupy_backends.cuda.libs import nvrtc

from cukv import _cubins, _sources, reference
from cukv._arrays import FP8
from cukv._specialisations import (
    SPELLING,
    decode_tiles,
    latent_tiles,
    prefill_tiles,
    runs_on,
    sm90_tiles,
    specialisations,
    stream_tiles,
)

ARCHS = ("sm_80", "sm_90a", "sm_100a")
# NVRTC takes longer than linearly for many specialisations in one program, and reads the headers
# once in each program: ten is where both are small. Threads compile side by side.
BATCH = 10

NAMES = sorted({*specialisations(), *(p.stem for p in _sources.ROOT.glob("*.cu"))})
FILES = sorted(p for p in _sources.ROOT.rglob("*") if p.suffix in {".cu", ".cuh"})


# Resources


class Resources(NamedTuple):
    """What one function of a compiled program needs."""

    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def read_log(log):
    """Read the compiler's log: (entry names in order, [(function, its Resources)])."""
    entries = re.findall(r"Compiling entry function '(\S+)'", log)
    functions = re.findall(
        r"Function properties for (\S+)\s*\n[^\n]*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads",
        log,
    )
    return entries, [(name, Resources(*map(int, numbers))) for name, *numbers in functions]


def compile_and_measure(name, arch, template_args):
    """Compile one batch: (function, its Resources) of all that it holds, kernels named readably."""
    _, lowered, log = _cubins.compile_kernels(name, arch, template_args)
    entries, functions = read_log(log)
    # Products that wait for each other: C7510 to C7515. C7519 only adds what would be added anyway.
    serialised = re.findall(r"[^\n]*\bC751[0-5]\b[^\n]*", log)
    assert not serialised, "\n".join(serialised)
    # A log that was not understood must not pass as one without spills.
    assert sorted(entries) == sorted(lowered), f"the compiler's log was not understood:\n{log}"
    assert {*entries} <= {function for function, _ in functions}, log
    names = {
        symbol: _cubins.symbol(name, a) for symbol, a in zip(lowered, template_args, strict=True)
    }
    return [(names.get(function, function), needs) for function, needs in functions]


def compile_and_check(name, arch, table):
    """Compile all of a table, in batches; raise unless every function keeps to its registers."""
    batches = [table[i : i + BATCH] for i in range(0, len(table), BATCH)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        measured = pool.map(functools.partial(compile_and_measure, name, arch), batches)
        functions = [function for batch in measured for function in batch]
    assert len(functions) >= len(table) > 0
    bad = [f"{function}: {needs}" for function, needs in functions if any(needs)]
    assert not bad, f"for {arch} {len(bad)} of {len(functions)} use local memory:\n" + "\n".join(
        bad
    )


@pytest.mark.parametrize(
    ("name", "arch"), [(name, arch) for name in NAMES for arch in ARCHS if runs_on(name, arch)]
)
def test_every_specialisation_compiles_without_stack_or_spills(name, arch):
    compile_and_check(name, arch, specialisations()[name])


def test_every_kernel_is_compiled_for_some_architecture():
    assert all(any(runs_on(name, arch) for arch in ARCHS) for name in NAMES)


def test_the_gate_notices_products_that_wait_for_each_other(kernel_sources):
    path = kernel_sources / "common" / "team.cuh"
    waits = "wgmma_wait_group<1>();\n"
    assert path.read_text().count(waits) == 1
    # A branch between products and their wait.
    branch = waits + "        if (lane_idx == 1) {\n            return;\n        }\n"
    path.write_text(path.read_text().replace(waits, branch))
    with pytest.raises(AssertionError, match=r"C751\d"):
        compile_and_check("prefill_sm90", "sm_90a", [sm90_tiles()[0].template_args])


# Shared memory: the host asks for it, and kernels lay a struct over it.

TILES = {
    "decode": ("DecodeCta", decode_tiles),
    "prefill_sm80": ("PrefillCta", prefill_tiles),
    "prefill_sm90": ("PrefillSm90Cta", sm90_tiles),
    "mla_decode": ("MlaDecodeCta", latent_tiles),
    "mla_decode_sm90": (None, latent_tiles),
    "mla_stream_sm90": ("MlaStreamSm90Cta", stream_tiles),
}


def smem_struct(name, cta, template_args):
    """Spell the struct that one specialisation lays over its shared memory."""
    if cta is None:
        return "cukv::Latent" + ("Fp8" if template_args["CKV"] in FP8 else "") + "Smem"
    parameters = re.search(rf"template <([^>]*)>\s*struct {cta} {{", _sources.source(name))[1]
    names = [p.split()[-1].rstrip("_") for p in parameters.split(",")]
    args = ", ".join(str(SPELLING.get(template_args[n], template_args[n])) for n in names)
    return f"cukv::{cta}<{args}>::Smem"


@pytest.mark.parametrize("name", TILES)
def test_the_host_asks_for_as_much_shared_memory_as_a_kernel_lays_out(name):
    cta, tiles = TILES[name]
    sizes = {
        smem_struct(name, cta, tile.template_args): tile.smem_bytes
        for tile in tiles()
        if tile.kernel == name
    }
    asserts = [f'static_assert(sizeof({s}) == {size}, "{s}");' for s, size in sizes.items()]
    text = "\n".join([_sources.source(name), *asserts, ""])
    params = _sources.struct_layout(_sources.params_struct(name), name)
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        arch = next(arch for arch in ARCHS if runs_on(name, arch))
        flags = (*_cubins.options(arch), f"-DPARAMS_BYTES={params.size}")
        nvrtc.compileProgram(program, flags)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:4000], pytrace=False)
    finally:
        nvrtc.destroyProgram(program)


BAD_KERNEL = """
namespace cukv {
struct BadParams {
    float* data;
    int32_t n;
};

template <int SIZE>
__global__ void __launch_bounds__(1024) bad(const __grid_constant__ BadParams p) {
    float rmem[SIZE];
    for (int i = 0; i < SIZE; ++i) {
        rmem[i] = p.data[i * threadIdx.x];
    }
    __syncthreads();
    for (int i = 0; i < SIZE; ++i) {
        p.data[i] = rmem[%s];
    }
}
}  // namespace cukv
"""


@pytest.mark.parametrize(
    ("size", "index", "problem"),
    [
        (8, "i", None),
        (64, "(i * p.n) % SIZE", "stack_bytes=256, spill_store_bytes=0"),  # indexed at run time
        (200, "SIZE - 1 - i", r"spill_store_bytes=[1-9]"),  # more than 64 registers
    ],
)
def test_the_gate_notices_stack_frames_and_spills(size, index, problem, kernel_sources):
    text = '#include "common/types.cuh"\n' + BAD_KERNEL % index
    (kernel_sources / "bad.cu").write_text(text.replace("for (", "#pragma unroll\n    for ("))
    if problem is None:
        compile_and_check("bad", "sm_90a", [{"SIZE": size}])
    else:
        with pytest.raises(AssertionError, match=rf"1 of 2 .*\n\s*cukv::bad<{size}>: .*{problem}"):
            compile_and_check("bad", "sm_90a", [{"SIZE": 4}, {"SIZE": size}])


def test_the_gate_refuses_a_log_that_it_cannot_read(monkeypatch):
    compiled = _cubins.compile_kernels("seq_lens", "sm_90a", [{}])
    for log in ("", compiled[2].replace("entry function", "entry"), "x" + compiled[2].upper()):
        monkeypatch.setattr(_cubins, "compile_kernels", lambda *_, log=log: (*compiled[:2], log))
        with pytest.raises(AssertionError, match="not understood"):
            compile_and_check("seq_lens", "sm_90a", [{}])


# The contract of a kernel file


def without_comments(text):
    """Drop comments, keep lines."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def contract(name):
    """Give the comment that opens a kernel's file, as one line."""
    lines = _sources.source(name).splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    return " ".join(line.removeprefix("//").strip() for line in lines[:end])


def find(path, dotted):
    """Find ``Class.method`` or ``function`` of a module of this tree; None if there is none."""
    found = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for part in dotted.split("."):
        is_noun = isinstance(found, type) and dataclasses.is_dataclass(found)
        fields = [f.name for f in dataclasses.fields(found)] if is_noun else []
        if not hasattr(found, part) and part not in fields:
            return None
        found = getattr(found, part, part)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_names_the_methods_that_launch_it_and_its_definition(name):
    text = contract(name)
    assert text.startswith(f"{name} -- "), "the first line says the kernel's name and what it does"
    said = re.search(r"Host: (.*?)\s*Reference: cukv/reference\.py (\w+)$", text)
    assert said, "the contract ends with 'Host: <file> <method>  Reference: <file> <function>'"
    path = None
    for host in said[1].split(", "):
        path, _, method = host.rpartition(" ") if " " in host else (path, "", host)
        assert find(path, method) is not None, f"{path} has no {method}"
    assert find("cukv/reference.py", said[2]), f"cukv/reference.py has no {said[2]}"
    base = re.sub(r"_sm\d+$", "", name)
    assert said[2] == base or not hasattr(reference, base), f"its definition is {base}"


@pytest.mark.parametrize("name", NAMES)
def test_file_global_function_and_table_share_one_name(name):
    code = without_comments(_sources.source(name))
    bounds = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)"
    found = re.findall(rf"__global__\s+void(?:\s+{bounds})?\s+(\w+)\(", code)
    assert found == [name]
    assert code.count("__global__") == 1
    assert name in specialisations()


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_checks_the_size_of_its_parameters_and_its_template_is_the_table(name):
    code = " ".join(without_comments(_sources.source(name)).split())
    struct_name = "".join(word.capitalize() for word in name.split("_")) + "Params"
    assert re.search(rf"static_assert\( ?sizeof\({struct_name}\) == PARAMS_BYTES,", code)
    declared = _sources.template_names(name)
    for template_args in specialisations()[name]:
        assert sorted(template_args) == sorted(declared)
    unique = {str(sorted(map(str, s.items()))) for s in specialisations()[name]}
    assert len(unique) == len(specialisations()[name])


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(_sources.ROOT).as_posix())
def test_a_kernel_source_has_no_macros_and_asm_only_where_instructions_are(path):
    code = without_comments(path.read_text(encoding="utf-8"))
    name = path.relative_to(_sources.ROOT).as_posix()
    assert "#define" not in code
    assert re.fullmatch(r"common/ptx(_\w+)?\.cuh", name) or not re.search(r"\basm\b", code)
    includes = re.findall(r"#include (\S+)", code)
    if path.suffix == ".cu":
        assert all(re.fullmatch(r'"common/\w+\.cuh"', i) for i in includes)
    else:
        assert code.lstrip().startswith("#pragma once")
    assert "extern" not in re.sub(r"extern __shared__", "", code)


# Names and numbers that both sides read


def test_template_arguments_that_the_kernel_does_not_declare_are_refused():
    with pytest.raises(TypeError, match=r"gather: template takes \['FROM', 'TO', 'VEC'\], got"):
        _cubins.compile_kernels("gather", "sm_90a", [{"FROM": "half", "VEC": 8}])
    with pytest.raises(TypeError, match=r"seq_lens: template takes \[\], got \['VEC'\]"):
        _cubins.compile_kernels("seq_lens", "sm_90a", [{"VEC": 8}])


def test_a_source_that_does_not_compile_raises_with_the_compilers_words(kernel_sources):
    path = kernel_sources / "seq_lens.cu"
    path.write_text(path.read_text().replace("p.table.batch_size", "p.table.batch_syze"))
    with pytest.raises(RuntimeError, match=r"cukv::seq_lens for sm_90a(?s:.*)batch_syze"):
        _cubins.compile_kernels("seq_lens", "sm_90a", [{}])


def test_parameters_that_drift_from_the_host_do_not_compile(kernel_sources, monkeypatch):
    layout = _sources.struct_layout("SeqLensParams", "seq_lens")
    drifted = layout._replace(size=layout.size + 8)
    monkeypatch.setattr(_cubins, "struct_layout", lambda *_: drifted)
    with pytest.raises(RuntimeError, match="host and device disagree on the parameters"):
        _cubins.compile_kernels("seq_lens", "sm_90a", [{}])


STRUCTS = """#include "common/types.cuh"

namespace cukv {

struct Inner {
    const char* base;  // a pointer; even so
    int32_t few;

    __device__ int twice() const { return 2 * few; }
};

struct Odd {
    float scale;
};

struct Base {
    const char* base_data;
    int32_t base_number;  // padding behind it, which stays when another struct has it as its base
};

struct alignas(64) Bytes {
    uint8_t opaque[128];
};

struct DerivedParams : Base {
    int32_t number;
    Bytes bytes;
    float scale;
};

struct ProbeParams {
    int32_t first;
    int64_t second;  // padded to 8
    Odd odd;
    Inner inner;
    uint32_t third;
    const Inner* pointer;
    float* other;
    uint64_t fourth;
    float last;

    // Members that are not fields:
    __device__ int64_t sum() const { return first + second; }
};

static_assert(sizeof(ProbeParams) == PARAMS_BYTES, "host and device disagree on the parameters");
%s

__global__ void probe(const __grid_constant__ ProbeParams p) {
    if (p.sum() == 1) {
        *p.other = p.last + p.odd.scale + p.inner.twice() + p.pointer->few + p.third + p.fourth;
    }
}

}  // namespace cukv
"""


def test_parameters_are_packed_where_the_compiler_puts_them(kernel_sources):
    offsets = {"first": 0, "second": 8, "odd": 16, "inner": 24, "third": 40, "pointer": 48}
    offsets |= {"other": 56, "fourth": 64, "last": 72}
    asserts = "\n".join(
        f'static_assert(__INTADDR__(&(((ProbeParams*)0)->{field})) == {offset}, "{field}");'
        for field, offset in offsets.items()
    )
    (kernel_sources / "probe.cu").write_text(STRUCTS % asserts)
    layout = _sources.struct_layout("ProbeParams", "probe")
    assert (layout.names, layout.size, layout.alignment) == (tuple(offsets), 80, 8)
    _cubins.compile_kernels("probe", "sm_90a", [{}])  # holds sizeof and every offset to account

    inner = _sources.struct_layout("Inner", "probe")
    assert (inner.names, inner.size) == (("base", "few"), 16)
    values = (1, 2, struct.pack("=f", 0.5), b"i" * 16, 3, 4, 5, 6, 0.25)
    packed = struct.pack(layout.format, *values)
    assert len(packed) == 80
    for field, code, value in [
        ("first", "=i", 1), ("second", "=q", 2), ("odd", "=f", 0.5), ("inner", "=16s", b"i" * 16),
        ("third", "=I", 3), ("pointer", "=Q", 4), ("other", "=Q", 5), ("fourth", "=Q", 6),
        ("last", "=f", 0.25),
    ]:  # fmt: skip
        assert struct.unpack_from(code, packed, offsets[field]) == (value,), field


def test_fields_of_a_base_come_first_and_bytes_where_they_are_aligned(kernel_sources):
    offsets = {"base_data": 0, "base_number": 8, "number": 16, "bytes": 64, "scale": 192}
    asserts = "\n".join(
        f'static_assert(__INTADDR__(&(((DerivedParams*)0)->{field})) == {offset}, "{field}");'
        for field, offset in offsets.items()
    )
    text = STRUCTS.replace("ProbeParams", "Other").replace("DerivedParams", "ProbeParams")
    text = text.replace("sizeof(Other)", "sizeof(ProbeParams)")
    (kernel_sources / "probe.cu").write_text(text % asserts.replace("DerivedParams", "ProbeParams"))
    layout = _sources.struct_layout("ProbeParams", "probe")
    assert (layout.names, layout.size, layout.alignment) == (tuple(offsets), 256, 64)
    _cubins.compile_kernels("probe", "sm_90a", [{}])
    packed = struct.pack(layout.format, 1, 2, 3, b"b" * 128, 0.25)
    for field, code, value in [
        ("base_data", "=Q", 1), ("base_number", "=i", 2), ("number", "=i", 3),
        ("bytes", "=128s", b"b" * 128), ("scale", "=f", 0.25),
    ]:  # fmt: skip
        assert struct.unpack_from(code, packed, offsets[field]) == (value,), field


@pytest.mark.parametrize(
    "field",
    ["half data[4];", "float x, y;", "double x;", "Missing inner;", "int32_t n = 3;"],
)
def test_a_field_that_the_host_cannot_pack_raises(field, kernel_sources):
    text = STRUCTS.replace("    float last;\n", f"    float last;\n    {field}\n") % ""
    (kernel_sources / "probe.cu").write_text(text)
    with pytest.raises(
        ValueError, match=r"one plain field per line|no struct (half|Missing|double)"
    ):
        _sources.struct_layout("ProbeParams", "probe")


@pytest.mark.parametrize(
    ("file", "constant", "module", "name"),
    [
        ("common/scan.cuh", "SCAN_THREADS", "_kernels", "SCAN_THREADS"),
        ("common/rows.cuh", "MAX_ROWS_PER_CTA", "_rows", "_MAX_ROWS_PER_CTA"),
        ("merge_states.cu", "VECS_PER_LANE", "merge", "_VECS_PER_LANE"),
        ("common/mask.cuh", "MASK_STEP", "_plan", "_MASK_STEP"),
        ("mask_tiles.cu", "MASK_THREADS", "_plan", "_MASK_THREADS"),
        ("plan.cu", "MAX_THREADS", "_plan", "_PLAN_THREADS"),
        ("common/latent.cuh", "HEAD_DIM_CKV", "_latent_attention", "_HEAD_DIM_CKV"),
        ("common/latent.cuh", "HEAD_DIM_KPE", "_latent_attention", "_HEAD_DIM_KPE"),
        ("common/latent.cuh", "MAX_LATENT_ITEMS", "_latent_attention", "_MAX_PARTS"),
        ("common/latent_sm90.cuh", "LATENT_TOKENS", "_latent_maps", "_STEP_TOKENS"),
    ],
)
def test_a_constant_of_both_sides_is_one_number(file, constant, module, name):
    text = (_sources.ROOT / file).read_text(encoding="utf-8")
    (number,) = re.findall(rf"constexpr int {constant} = (\d+);", text)
    assert getattr(importlib.import_module(f"cukv.{module}"), name) == int(number)


@pytest.mark.parametrize(
    ("kernel", "module", "name"),
    [
        ("gather", "_rows", "MOVE_THREADS"),
        ("copy_pages", "_rows", "MOVE_THREADS"),
        ("merge_states", "merge", "_CTA_THREADS"),
    ],
)
def test_a_launch_has_as_many_threads_as_its_bounds_allow(kernel, module, name):
    (number,) = re.findall(r"__launch_bounds__\((\d+)", _sources.source(kernel))
    assert getattr(importlib.import_module(f"cukv.{module}"), name) == int(number)
