"""Make the tables of README.md: what was measured, and what runs on which GPU.

    python tests/readme.py                         the tables anew, from tests/bench/record.json
    python tests/readme.py BENCH.json              a new record, then the tables
    python tests/readme.py BENCH.json PEERS.json   the same, beside FlashInfer and cuDNN
    python tests/readme.py --devices DEVICES.json  what several GPUs did, beside what there is

``BENCH.json`` is what ``pytest tests/bench --benchmark-json`` writes on a GPU, and ``DEVICES.json``
what ``pytest tests/bench/test_jax_devices.py`` does on several: figures of cukv have no other
source. ``PEERS.json`` is a list of rows, one a case, of one run of the same sources on the same
machine, which gave every library the same arrays in turns: ``case``, ``cukv_us``, a time of each
peer such as ``flashinfer_us``, and ``agree``, whether the answers do. Ratios come from there.
"""

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from gpu_record import digest

from cukv import _tiles
from cukv._arrays import BFLOAT16, FLOAT8_E4M3
from cukv._specialisations import latent_tiles, runs_on, stream_tiles
from cukv._tensor_maps import Copies

TREE = Path(__file__).parent.parent
RECORD = TREE / "tests" / "bench" / "record.json"
PEERS = {"flashinfer": "FlashInfer", "cudnn": "cuDNN"}
FLASHINFER = "0.6.13"

# The record


def read(path: Path, needs: str = "a GPU") -> Any:
    """Read JSON, or say what the benchmarks that write it need."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: benchmarks write it, on a machine with {needs}")
    return json.loads(path.read_text(encoding="utf-8"))


def condensed(bench: Any, peers: Any) -> dict[str, Any]:
    """Keep of pytest-benchmark's JSON what tables and notebooks show, in its own structure."""
    gpu = bench["machine_info"].get("gpu", {})
    if "driver" not in gpu:
        raise SystemExit(f"not measured on a GPU: {gpu.get('device', 'no GPU is named')}")
    wrong = [row["case"] for row in peers if "cukv_us" in row and not row.get("agree")]
    if wrong:
        raise SystemExit(f"cukv and its peers do not agree: {', '.join(wrong)}")
    return {
        "datetime": bench["datetime"],
        "partial": bench.get("partial"),
        "machine_info": {"gpu": gpu},
        "digest": bench["digest"],
        "ceilings": bench["ceilings"],
        "benchmarks": [
            {
                **{key: b[key] for key in ("group", "name")},
                "extra_info": {key: rounded(value) for key, value in b["extra_info"].items()},
                "stats": {key: rounded(b["stats"][key]) for key in ("median", "iqr", "rounds")},
            }
            for b in bench["benchmarks"]
        ],
        "peers": peers,
    }


def rounded(value: Any) -> Any:
    """Keep 5 digits of a float: timings have fewer."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record with one benchmark, or row of peers, a line."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


# Speed


class Row(NamedTuple):
    """A line of the table: a benchmark, and the case that has it beside its peers."""

    kernel: str
    shape: str
    benchmark: str
    case: str = ""


def rows() -> Iterator[Row]:
    """Say what the table lists, where it was measured."""
    for name, shape in (
        ("NHD_b64_n1024", "64 x 1024 tokens, 8 heads of 128, page 16"),
        ("HND_b64_n1024", "the same"),
        ("NHD_b256_n1", "256 x 1 token, positions found inside"),
    ):
        yield Row(f"`append` {name[:3]}", shape, f"test_append[{name}]", f"append/{name}")
    yield Row("`append` of MLA", "64 x 1024 latent rows, page 64", "test_append_mla[NHD_b64_n1024]")
    yield Row("`gather`", "64 x 1024 tokens", f"test_gather[b64_kv1024_{_HEADS}]")
    yield Row("`copy_pages`", "4096 pages", f"test_copy_pages[b64_kv1024_{_HEADS}]")
    yield from _attention_rows()
    for batch, shape in ((64, "64 x 1024 keys"), (4096, "4096 x 16 keys")):
        name = f"test_plan_update_of_decode[b{batch}_kv{shape.split()[2]}_{_HEADS}]"
        yield Row("`plan.update`", shape, name)
    yield Row("`packbits`", "64 Mi booleans", "test_packbits[1x67108864]", "bits/1_of_64M")
    name = "test_segment_packbits[4x16777216]"
    yield Row("`segment_packbits`", "4 x 16 Mi booleans", name, "bits/4_of_64M")
    name = "16384x4x32x128"
    shape = "16384 rows of 4 states, 32 heads of 128"
    yield Row("`merge_states`", shape, f"test_merge_states[{name}]", f"merge/{name}")


_HEADS = "h32x8_d128_p16"


def _attention_rows() -> Iterator[Row]:
    said = ", 32 query heads, 8 KV heads of 128, page 16"  # and so are those below
    for batch, kv in (
        *((1, 1024), (1, 8192), (1, 131072), (16, 1024), (16, 8192), (64, 8192)),
        *((128, 2048), (256, 1024)),
    ):
        name, shape = f"b{batch}_kv{kv}", f"{batch} x {kv} keys{said}"
        case = f"decode/{name}_h32x8_p16"
        yield Row("`decode`", shape, f"test_decode[{name}_{_HEADS}]", case)
        said = ""
    for name, shape in (
        ("b8_kv1024_h64x8", "8 x 1024 keys, 64 query heads"),
        ("b32_kv4096_h32x32", "32 x 4096 keys, 32 KV heads"),
    ):
        yield Row("`decode`", shape, f"test_decode[{name}_d128_p16]", f"decode/{name}_p16")
    name = f"test_decode_of_fp8_beside_bfloat16[b64_kv8192_{_HEADS}_float8_e4m3fn]"
    yield Row("`decode`", "64 x 8192 keys in fp8", name)
    for kind in ("causal", "full"):
        for batch, n in ((1, 16384), (4, 4096), (16, 1024)):
            name = f"b{batch}_q{n}_kv{n}_{_HEADS}{'_full' if kind == 'full' else ''}"
            shape = f"{batch} x {n} tokens, {kind}"
            case = f"ragged/b{batch}_n{n}_{kind}"
            yield Row("`prefill`, ragged", shape, f"test_ragged_prefill[{name}]", case)
    for dim in (64, 256):
        name, case = f"b4_q4096_kv4096_h32x8_d{dim}_p16", f"ragged/b4_n4096_causal_d{dim}"
        shape = f"4 x 4096 tokens, causal, heads of {dim}"
        yield Row("`prefill`, ragged", shape, f"test_ragged_prefill[{name}]", case)
    name = f"test_ragged_prefill_of_fp8_beside_bfloat16[b4_q4096_kv4096_{_HEADS}_float8_e4m3fn]"
    yield Row("`prefill`, ragged", "4 x 4096 tokens, causal, all of fp8", name)
    for batch, qo, kv, page in ((16, 512, 8192, 16), (4, 4096, 4096, 16), (16, 512, 8192, 64)):
        shape = f"{batch} x {qo} rows on {kv} keys, causal, page {page}"
        name = f"test_paged_prefill[b{batch}_q{qo}_kv{kv}_h32x8_d128_p{page}]"
        yield Row("`prefill`, paged", shape, name, f"paged/b{batch}_q{qo}_kv{kv}_p{page}")
    for benchmark, shape, kind in (
        ("test_a_random_mask", "random bits", "random"),
        ("test_a_tree_mask_costs_little_more_than_causal", "trees at the ends of prompts", "tree"),
    ):
        name = f"{benchmark}[b4_q4096_kv4096_{_HEADS}]"
        yield Row("`prefill`, masked", f"4 x 4096 tokens, {shape}", name, f"mask/{kind}_b4_n4096")
    for batch, kv, heads in (
        *((128, 4096, 128), (128, 4096, 16), (16, 4096, 16)),
        *((1, 65536, 128), (1, 4096, 128)),
    ):
        shape, name = f"{batch} x {kv} latent rows, {heads} heads", f"b{batch}_kv{kv}_h{heads}"
        yield Row("MLA `decode`", f"{shape}, page 64", f"test_mla_decode[{name}]", f"mla/{name}")
    for batch, prompt, own in ((64, 8192, 256), (256, 2048, 128)):
        shape = f"{batch} requests, {prompt} keys shared, {own} of each"
        name = f"test_cascade_of_a_common_prompt[b{batch}_kv{prompt + own}_{_HEADS}]"
        yield Row("cascade `attend`", shape, name, f"cascade/b{batch}_s{prompt}_u{own}")


# Benchmarks that are asked for a limit, whatever their shapes: the call, and on what.
_ASKED = {
    "test_decode_of_fp8_beside_bfloat16": ("`decode`", "64 x 8192 keys in fp8"),
    "test_ragged_prefill_of_fp8_beside_bfloat16": ("`prefill`", "4 x 4096 tokens in fp8"),
    "test_mixed_lengths_beside_even_ones": ("`decode`", "512 requests of mixed lengths"),
    "test_four_rows_beside_one": ("`prefill`", "4 rows each on 64 x 8192 keys"),
    "test_a_tree_mask_costs_little_more_than_causal": (
        "`prefill`",
        "4 x 4096 tokens, trees at the ends of prompts",
    ),
    "test_a_mixed_batch_costs_no_more_than_its_parts": (
        "`prefill`",
        "63 rows and a chunk of 2048, each on 8192 keys",
    ),
    "test_mla_decode_keeps_its_rate_beside_whole_parts": (
        "MLA `decode`",
        "66 to 130 requests, mixed lengths; 16 and 128 heads",
    ),
    "test_mla_decode_of_fp8_beside_bfloat16": ("MLA `decode`", "128 x 4096 latent rows in fp8"),
    "test_mla_decode_of_fp8_and_many_heads_beside_bfloat16": (
        "MLA `decode`",
        "128 x 4096 latent rows in fp8, 128 heads",
    ),
    "test_cascade_of_a_common_prompt": ("cascade `attend`", "a common prompt"),
    "test_cascade_of_a_random_prefix_tree": ("cascade `attend`", "random prefix trees"),
    "test_cascade_of_a_trace": ("cascade `attend`", "64 requests of a Mooncake trace at a time"),
    "test_cascade_grows": ("cascade `attend`", "prompts that are half shared, all sizes"),
    "test_plan_update_of_decode": ("`plan.update`", "64 and 4096 requests"),
    "test_prefixes_of_4096_requests_of_1000_pages": (
        "`CascadeLevels.from_prefixes`",
        "4096 requests of 1000 pages, on the host",
    ),
    "test_a_step_in_a_graph_of_cupy": (
        "`jax.jit`",
        "a step of `append` and `decode` over 32 layers",
    ),
}


def paragraph(text: str) -> str:
    """Break lines as the README does."""
    return textwrap.fill(text, 100, break_on_hyphens=False) + "\n"


_UNMEASURED = paragraph(
    "No run of these kernels' benchmarks is on record, so there are no figures here: the commands "
    "below make the table, on a machine with a GPU."
)
_HOW = (
    "GPU time under CUDA-graph replay with inputs rotated past the L2, where calls of `decode` "
    "follow each other and overlap at their ends; answers are checked before anything is timed. "
    "Shares are of what that card itself did:"
)
_LIMITS = paragraph(
    "What is asked of times in the same run, and what they were; of several shapes the one that is "
    "furthest off:"
)
_PEERS = paragraph(
    f"The last column is the time of the fastest of FlashInfer {FLASHINFER} and cuDNN, backend by "
    "backend, over cukv's: the same arrays, in turns, in one run; the answers agree. Unless a row "
    "says otherwise, attention has 32 query heads over 8 KV heads of 128, and pages of 16 tokens."
)


def speed(record: Any) -> str:
    """Say what was measured, where and when, and make the tables of it."""
    benchmarks = {b["name"]: b for b in record["benchmarks"]}
    several = _several(record.get("devices"))
    if not benchmarks:
        return _UNMEASURED + several
    gpu, peers = record["machine_info"]["gpu"], {row["case"]: row for row in record["peers"]}
    measured = [row for row in rows() if row.benchmark in benchmarks]
    beside = any(row.case in peers for row in measured)
    text = paragraph(
        f"One {gpu['device']}, driver {gpu['driver']}, CUDA {gpu['nvrtc']}, clocks as found, "
        f"{record['datetime'][:10]}. {_cut_short(record)}{_of_these_kernels(record)}{_HOW} "
        f"{_ceilings(record['ceilings'])}. What only reads may come to more than a copy."
    )
    if beside:
        text += "\n" + _PEERS
    heads = ["kernel", "shape, bfloat16", "time", "rate", "share", *["fastest peer"] * beside]
    text += "\n" + _line(*heads) + "|" + "---|" * len(heads) + "\n"
    for row in measured:
        benchmark = benchmarks[row.benchmark]
        cells = [row.kernel, row.shape, microseconds(benchmark), *_rate(benchmark["extra_info"])]
        text += _line(*cells, *[_peer(peers.get(row.case, {}))] * beside)
    return text + _limits(record["benchmarks"]) + _host_times(benchmarks) + several


def _cut_short(record: Any) -> str:
    """Say so if not all that was asked of the run was measured."""
    return f"**The run was cut short: {record['partial']}.** " if record["partial"] else ""


def _of_these_kernels(record: Any) -> str:
    """Say so if the sources are no longer those that were measured."""
    return "" if record["digest"] == digest() else "**The kernels have changed since.** "


def _ceilings(ceilings: Any) -> str:
    copy = f"a copy of device memory, {ceilings['copy'] / 1e12:.2f} TB/s"
    if not ceilings["matmul"]:
        return copy
    return f"{copy}, or a product of matrices, {ceilings['matmul'] / 1e12:.0f} TFLOP/s"


def microseconds(benchmark: Any) -> str:
    """Write a median time with as many digits as it has."""
    us = 1e6 * benchmark["stats"]["median"]
    return f"{us:.0f} us" if us >= 1000 else f"{us:.1f} us" if us >= 4 else f"{us:.2f} us"


def _rate(info: Any) -> tuple[str, str]:
    """Choose the rate that is nearer to its ceiling: give it and its share."""
    if not info.get("gbs"):
        return "", ""
    if info.get("of_matmul", 0) > info["of_copy"]:
        return f"{info['tflops']:.0f} TFLOP/s", f"{info['of_matmul']:.0%} of a matmul"
    return f"{info['gbs'] / 1000:.2f} TB/s", f"{info['of_copy']:.0%} of a copy"


def _peer(row: Any) -> str:
    """Name the fastest peer of a row, and how its time compares with cukv's."""
    times: dict[str, float] = {}
    for key, us in row.items():
        peer = key.removesuffix("_us").partition("-")[0]  # without its backend
        if key.endswith("_us") and "_host" not in key and peer in PEERS:
            times[peer] = min(us, times.get(peer, us))
    if not times:
        return ""
    peer = min(times, key=times.__getitem__)
    return f"{PEERS[peer]}, {times[peer] / row['cukv_us']:.2f} x"


def _limits(benchmarks: Any) -> str:
    """Make the table of what is asked and whether it is met, one line for all shapes of a kind."""
    lines = ""
    for kind, what in _ASKED.items():
        infos = [b["extra_info"] for b in benchmarks if b["name"].partition("[")[0] == kind]
        infos = [info for info in infos if "asked" in info]
        if not infos:
            continue
        worst = max(infos, key=lambda info: info["reached"] / info["asked"])
        met = sum(info["reached"] <= info["asked"] for info in infos)
        said = ("no", "yes")[met] if len(infos) == 1 else f"{met} of {len(infos)}"
        asked = f"at most {worst['asked']:g} {worst['of']}"
        lines += _line(*what, f"{worst['reached']:.4g}", asked, said)
    if not lines:
        return ""
    heads = _line("call", "on", "reached", "asked", "met") + "|---|---|---|---|---|\n"
    return f"\n{_LIMITS}\n{heads}{lines}"


_HOST = {"append": "`append`", "gather": "`gather`", "decode": "`decode`"}
_HOST |= {"ragged_prefill": "`prefill`", "mla_decode": "MLA `decode`", "cascade": "`attend`"}


def _host_times(benchmarks: Any) -> str:
    """Say what calls cost the host."""
    said = []
    for name, call in _HOST.items():
        eager = benchmarks.get(f"test_an_eager_call[{name}]")
        planned = benchmarks.get(f"test_a_call_with_a_plan[{name}]")
        if eager:
            beside = f" ({microseconds(planned)} with a plan made before)" if planned else ""
            said.append(f"{call} {microseconds(eager)}{beside}")
    if not said:
        return ""
    text = f"What an eager call costs the host there, until it returns: {', '.join(said)}."
    return "\n" + paragraph(text)


# Benchmarks over several GPUs: on what, and what each of them has a part of.
SEVERAL = {
    "test_keys_over_devices[kv1048576]": (
        "1 x 1048576 keys, 32 query heads, 8 KV heads of 128, page 16",
        "keys; states merge by their lse",
    ),
    "test_heads_over_devices[b64_kv8192]": ("64 x 8192 keys", "heads"),
}


def _over_devices(record: Any) -> dict[str, Any]:
    """Give the benchmarks over several GPUs, by name, or refuse a run that has none."""
    benchmarks = {b["name"]: b for b in record["benchmarks"]}
    found = {name: benchmarks[name] for name in SEVERAL if name in benchmarks}
    if not found:
        raise SystemExit(f"not measured on several GPUs: there is none of {', '.join(SEVERAL)}")
    return found


def _several(record: Any) -> str:
    """Make the table of what several GPUs do; None: there is no run of theirs."""
    if not record:
        return ""
    found = _over_devices(record)
    gpu, count = record["machine_info"]["gpu"], next(iter(found.values()))["extra_info"]["devices"]
    text = paragraph(
        f"On {count} {gpu['device']} of one host, driver {gpu['driver']}, CUDA {gpu['nvrtc']}, "
        f"{record['datetime'][:10]}. {_cut_short(record)}{_of_these_kernels(record)}Wall-clock "
        "time of a layer in a loop over 32 inside `jax.jit`; answers are those of one of these "
        "GPUs, and no key or value leaves its own:"
    )
    heads = ("`cukv.jax.decode`", "sharded", "one GPU", f"{count} GPUs", "times as fast", "asked")
    text += "\n" + _line(*heads, "met") + "|---|---|---|---|---|---|---|\n"
    for name, benchmark in found.items():
        info = benchmark["extra_info"]
        alone = {"stats": {"median": 1e-6 * info["one_us"]}}
        times = (microseconds(each) for each in (alone, benchmark))
        met = "yes" if info["reached"] <= info["asked"] else "no"
        ratios = (f"{1 / info[key]:.2f}" for key in ("reached", "asked"))
        text += _line(*SEVERAL[name], *times, *ratios, met)
    return "\n" + text


# Support


class Generation(NamedTuple):
    """GPUs of one kind: their architecture, and the shared memory of a CTA and of an SM."""

    name: str
    arch: str
    smem_limits: tuple[int, int]


# CUDA C++ Programming Guide, "Compute Capabilities": 163, 99 or 227 KB of 164, 100 or 228.
GENERATIONS = (
    Generation("A100", "sm_80", (163 << 10, 164 << 10)),
    Generation("RTX 30, 40, 50; L40", "sm_89", (99 << 10, 100 << 10)),
    Generation("H100, H200", "sm_90a", (227 << 10, 228 << 10)),
    Generation("B200", "sm_100a", (227 << 10, 228 << 10)),
)
DTYPES = {BFLOAT16: "fp16, bf16", FLOAT8_E4M3: "fp8"}
# Sizes of keys and values, each for all those that its tiles serve. The kernel for Hopper has tiles
# of the sizes without "to" only.
HEAD_DIMS = {
    (64, 64): "64",
    (128, 128): "128",
    (120, 120): "to 128",
    (192, 128): "192 / 128",
    (248, 128): "to 256 / 128",
    (256, 256): "256",
    (248, 248): "to 256",
}

_WITHIN = {"64": "to 128", "128": "to 128", "192 / 128": "to 256 / 128", "256": "to 256"}


IN_PIECES = Copies(paged=True, mapped=True)


def kernels_of(
    generation: Generation,
    dtype: Any,
    dims: tuple[int, int],
    *,
    one_row: bool,
    copies: Copies = IN_PIECES,
    aligned: bool = True,
) -> tuple[str, ...]:
    """Give the kernels that serve a batch on a GPU of a generation: none, one or two of them."""
    arrays = [SimpleNamespace(dtype=dtype, shape=(4096, 16, 8, dim)) for dim in dims]
    pages: Any = SimpleNamespace(
        first=SimpleNamespace(array=arrays[0], device=0),
        second=SimpleNamespace(array=arrays[1], device=0),
    )
    rows = 64 if one_row else 64 * 512
    with on(generation):
        try:
            served = _tiles.choose_tiles(
                "decode", pages, aligned, rows, 4, 64, 64 * 1024, one_row, False, copies
            )
        except NotImplementedError:
            return ()
    return tuple(dict.fromkeys(each.tile.kernel for each in served))


def on(generation: Generation) -> Any:
    """Choose as on a GPU of a generation."""
    return mock.patch.multiple(
        _tiles,
        arch_of=lambda device: generation.arch,
        smem_limits=lambda device: generation.smem_limits,
        num_sms=lambda device: 128,
    )


def latent_kernels(generation: Generation, fp8: bool) -> tuple[str, ...]:
    """Give the kernels for latent rows of 512 + 64 on a GPU of a generation."""
    with on(generation):
        tiles = [
            tile
            for tile in (*latent_tiles(), *stream_tiles())
            if (tile.ckv == FLOAT8_E4M3) == fp8
            and runs_on(tile.kernel, generation.arch)
            and _tiles.ctas_per_sm(tile, 0)
        ]
    return tuple(dict.fromkeys(tile.kernel for tile in tiles))


def support() -> str:
    """Make the table of what runs where, from the specialisations that there are."""
    heads = ("attention", "dtypes", "head_dim", *(each.name for each in GENERATIONS))
    text = _line(*heads) + "|" + "---|" * len(heads) + "\n"
    for line in _attention_lines():
        text += _line(*line)
    for fp8, dtypes in ((False, "fp16, bf16"), (True, "ckv e4m3")):
        cells = (_cell(latent_kernels(generation, fp8)) for generation in GENERATIONS)
        text += _line("MLA `decode`", dtypes, "512 + 64", *cells)
    return text


def _line(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"


def _cell(kernels: tuple[str, ...]) -> str:
    return ", ".join(f"`{kernel}`" for kernel in kernels) or "no"


_CALLS: dict[str, dict[str, Any]] = {
    "`decode`": {"one_row": True},
    "`prefill`, paged": {"one_row": False},
    "`prefill`, ragged": {"one_row": False, "copies": Copies(paged=False, mapped=True)},
}


def _attention_lines() -> Iterator[tuple[str, ...]]:
    """Make the lines of attention; dtypes, sizes and kinds of keys that are alike share one.

    A cell names the kernel of requests of many rows: others of a batch have ``decode``.
    """
    lines: dict[tuple[Any, ...], list[str]] = {}
    for operation, call in _CALLS.items():
        found: dict[tuple[Any, ...], list[str]] = {}
        for dims, label in HEAD_DIMS.items():
            for dtype, name in DTYPES.items():
                served = (kernels_of(g, dtype, dims, **call)[-1:] for g in GENERATIONS)
                found.setdefault((label, tuple(map(_cell, served))), []).append(name)
        for (label, cells), names in found.items():
            lines.setdefault((", ".join(names), label, cells), []).append(operation)
    merged: dict[tuple[Any, ...], list[str]] = {}
    for (names, label, cells), operations in lines.items():
        operation = operations[0] if len(operations) == 1 else "`prefill`"
        merged.setdefault((operation, names, cells), []).append(label)
    for (operation, names, cells), labels in sorted(merged.items(), key=_order):
        wide = [label for label in labels if _WITHIN.get(label) not in labels]
        yield (operation, names, "; ".join(wide), *cells)


def _order(line: Any) -> tuple[Any, ...]:
    (operation, names, _), labels = line
    return operation != "`decode`", names, list(HEAD_DIMS.values()).index(labels[0])


# README.md


def rewritten(readme: str, record: Any) -> str:
    """Put the tables where the README marks them."""
    for name, body in (("speed", speed(record)), ("support", support())):
        begin, end = f"<!-- {name}: made by tests/readme.py -->\n", f"<!-- {name} ends -->\n"
        before, found, rest = readme.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise SystemExit(f"README.md has no {begin.strip()} with an end")
        readme = f"{before}{begin}{body}{end}{after}"
    return readme


def main(arguments: list[str]) -> None:
    """Make the record, if there is a new one, and the tables."""
    if arguments[:1] == ["--devices"]:
        needs = "several GPUs and JAX for CUDA"
        (bench,) = (read(Path(name), needs) for name in arguments[1:])
        found = condensed(bench, [])
        _over_devices(found)
        write_record(read(RECORD) | {"devices": found}, RECORD)
    elif arguments:
        bench, *peers = (read(Path(name)) for name in arguments)
        found = condensed(bench, peers[0] if peers else [])
        write_record(found | {"devices": read(RECORD)["devices"]}, RECORD)
    path = TREE / "README.md"
    path.write_text(rewritten(path.read_text(encoding="utf-8"), read(RECORD)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
