"""Make the tables of README.md: what was measured, and what runs on which GPU.

    python tests/readme.py                         the tables anew, from tests/bench/record.json
    python tests/readme.py BENCH.json              a new record, then the tables
    python tests/readme.py BENCH.json PEERS.json   the same, with times of FlashInfer and cuDNN

``BENCH.json`` is what ``pytest tests/bench --benchmark-json`` writes. ``PEERS.json`` is a list of
rows measured on the same machine, one a case, with ``case``, ``cukv_us``, a time of each peer such
as ``flashinfer_us``, and rates: the same arrays, in turns, in one run. No figure has another source.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from cukv import _tiles
from cukv._arrays import BFLOAT16, FLOAT8_E4M3
from cukv._specialisations import latent_tiles, runs_on

TREE = Path(__file__).parent.parent
RECORD = TREE / "tests" / "bench" / "record.json"
PEERS = {"flashinfer": "FlashInfer", "cudnn": "cuDNN"}
FLASHINFER = "0.6.13"

# The record


def read(path: Path) -> Any:
    """Read JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def condensed(bench: Any, peers: Any) -> dict[str, Any]:
    """Keep of pytest-benchmark's JSON what tables and notebooks show, in its own structure."""
    gpu = bench["machine_info"].get("gpu", {})
    if "driver" not in gpu:
        raise SystemExit(f"not measured on a GPU: {gpu.get('device', 'no GPU is named')}")
    return {
        "datetime": bench["datetime"],
        "machine_info": {"gpu": gpu},
        "ceilings": bench.get("ceilings"),
        "benchmarks": [
            {
                **{key: b[key] for key in ("group", "name", "params", "extra_info")},
                "stats": {key: b["stats"][key] for key in ("median", "iqr", "rounds")},
            }
            for b in bench["benchmarks"]
        ],
        "peers": peers,
    }


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record with one benchmark, or row of peers, a line."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]" if value else f"{json.dumps(key)}: []")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


# Speed


class Row(NamedTuple):
    """A line of the table: a case of the peers' rows, or else a benchmark."""

    kernel: str
    shape: str
    case: str
    benchmark: str = ""
    note: str = ""  # of the peer


_HEADS = "32 query heads, 8 KV heads of 128"


def _rows() -> Iterator[Row]:
    """Say what the table lists, where it was measured."""
    unlike = "positions not counted"
    tokens = "64 x 1024 tokens, 8 x 128, page 16"
    for layout, shape in (("NHD", tokens), ("HND", "the same")):
        name = f"{layout}_b64_n1024"
        yield Row(f"`append` {layout}", shape, f"append/{name}", f"test_append[{name}]", unlike)
    shape = "256 x 1 token, positions found inside"
    yield Row("`append` NHD", shape, "append/NHD_b256_n1", "test_append[NHD_b256_n1]", unlike)
    yield Row("`append` of MLA", "64 x 1024 latent rows", "", "test_append_mla[NHD_b64_n1024]")
    yield Row("`gather`", "64 x 1024 tokens", "", "test_gather[b64_kv1024_h32x8_d128_p16]")
    yield Row("`copy_pages`", "4096 pages", "", "test_copy_pages[b64_kv1024_h32x8_d128_p16]")
    decode = [(1, 1024), (1, 8192), (1, 131072), (16, 1024), (16, 8192), (64, 8192), (128, 2048)]
    for batch, kv in (*decode, (256, 1024)):
        shape = f"{batch} x {kv} keys"
        shape += f", {_HEADS}, page 16" if (batch, kv) == decode[0] else ""
        name = f"b{batch}_kv{kv}_h32x8"
        yield Row("`decode`", shape, f"decode/{name}_p16", f"test_decode[{name}_d128_p16]")
    for name, shape in (
        ("b8_kv1024_h64x8", "8 x 1024 keys, 64 query heads, 8 KV heads"),
        ("b32_kv4096_h32x32", "32 x 4096 keys, 32 query heads, 32 KV heads"),
    ):
        yield Row("`decode`", shape, f"decode/{name}_p16", f"test_decode[{name}_d128_p16]")
    name = "test_decode_of_fp8_beside_bfloat16[b64_kv8192_h32x8_d128_p16_float8_e4m3fn]"
    yield Row("`decode`", "64 x 8192 keys in fp8", "", name)
    for kind in ("causal", "full"):
        for batch, n in ((1, 16384), (4, 4096), (16, 1024)):
            shape = f"{batch} x {n} tokens, {kind}"
            shape += f", {_HEADS}" if (kind, batch) == ("causal", 1) else ""
            yield Row("`prefill`, ragged", shape, f"ragged/b{batch}_n{n}_{kind}")
    for batch, qo, kv, page in ((16, 512, 8192, 16), (4, 4096, 4096, 16), (16, 512, 8192, 64)):
        shape = f"{batch} x {qo} rows on {kv} keys, causal, page {page}"
        yield Row("`prefill`, paged", shape, f"paged/b{batch}_q{qo}_kv{kv}_p{page}")
    for kind, shape in (("random", "random bits"), ("tree", "trees at the ends of prompts")):
        yield Row("`prefill`, masked", f"4 x 4096 tokens, {shape}", f"mask/{kind}_b4_n4096")
    for batch, kv, heads in ((128, 4096, 128), (128, 4096, 16), (16, 4096, 16), (1, 65536, 128)):
        shape = f"{batch} x {kv} latent rows, {heads} heads, page 64"
        name = f"b{batch}_kv{kv}_h{heads}"
        yield Row("MLA `decode`", shape, f"mla/{name}", f"test_mla_decode[{name}]")
    for batch, prompt, own in ((64, 8192, 256), (256, 2048, 128)):
        shape = f"{batch} requests, {prompt} keys shared, {own} of each"
        name = f"b{batch}_kv{prompt + own}_h32x8_d128_p16"
        benchmark = f"test_cascade_of_a_common_prompt[{name}]"
        yield Row("cascade `attend`", shape, f"cascade/b{batch}_s{prompt}_u{own}", benchmark)
    for batch in (64, 4096):
        yield Row("`plan.update`", f"{batch} requests", f"self/plan_update_b{batch}")
    yield Row("`packbits`", "64 Mi booleans", "bits/1_of_64M", "test_packbits[1x67108864]")
    name = "test_segment_packbits[4x16777216]"
    yield Row("`segment_packbits`", "4 x 16 Mi booleans", "bits/4_of_64M", name)
    shape, name = "16384 rows, 4 states, 32 x 128", "test_merge_states[16384x4x32x128]"
    yield Row("`merge_states`", shape, "merge/16384x4x32x128", name)


def speed(record: Any) -> str:
    """Say what was measured, where and when, and make the table of it."""
    gpu, peers = record["machine_info"]["gpu"], {row["case"]: row for row in record["peers"]}
    benchmarks = {b["name"]: b for b in record["benchmarks"]}
    measured = []
    for row in _rows():
        if row.case in peers:
            measured.append((row, _of_peers(peers[row.case], record["ceilings"])))
        elif row.benchmark in benchmarks:
            measured.append((row, _of_benchmark(benchmarks[row.benchmark])))
    agree = all(peers[row.case].get("agree") for row, _ in measured if row.case in peers)
    text = f"""One {gpu["device"]}, driver {gpu["driver"]}, CUDA {gpu["nvrtc"]}, clocks as found, \
{record["datetime"][:10]}. GPU time under CUDA-graph
replay with inputs rotated past the L2; the fastest of FlashInfer {FLASHINFER} and cuDNN, backend by
backend, on the same arrays in the same run{"; the results agree" if agree else ""}. Shares are of
what the card itself does: a copy of device memory, a product of matrices.

| kernel | shape, bfloat16 | time | rate | fastest peer | share |
|---|---|---|---|---|---|
"""
    for row, (us, rate, peer, share) in measured:
        peer += f", {row.note}" if peer and row.note else ""
        cells = (row.kernel, row.shape, microseconds(us), rate, peer, share)
        text += "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"
    return text


def microseconds(us: float) -> str:
    """Write a time with as many digits as it has."""
    return f"{us:.0f} us" if us >= 1000 else f"{us:.1f} us" if us >= 4 else f"{us:.2f} us"


def _of_peers(row: Any, ceilings: Any) -> tuple[float, str, str, str]:
    """Give time, rate, the fastest peer's time, and share of a ceiling of a row of peers."""
    others = {
        key[:-3]: us
        for key, us in row.items()
        if key.endswith("_us") and "_host" not in key and key.partition("_")[0] not in _OURS
    }
    peer = ""
    if others:
        name = min(others, key=others.__getitem__)
        peer = f"{microseconds(others[name])} {PEERS[name.partition('-')[0]]}"
    info = {"gbs": row.get("cukv_gbs"), "tflops": row.get("cukv_tflops")}
    info["of_copy"] = row.get("of_copy")
    if ceilings:
        if info["gbs"] and not info["of_copy"]:
            info["of_copy"] = info["gbs"] * 1e9 / ceilings["copy"]
        if info["tflops"] and ceilings["matmul"]:
            info["of_matmul"] = info["tflops"] * 1e12 / ceilings["matmul"]
    return row["cukv_us"], *_rate(info, peer)


_OURS = ("cukv", "card-copy", "limit")


def _of_benchmark(benchmark: Any) -> tuple[float, str, str, str]:
    """Give the same of a benchmark, which has no peer."""
    return 1e6 * benchmark["stats"]["median"], *_rate(benchmark["extra_info"], "")


def _rate(info: Any, peer: str) -> tuple[str, str, str]:
    """Choose the rate that is nearer to its ceiling: (rate, peer, share)."""
    of_copy, of_matmul = info.get("of_copy") or 0, info.get("of_matmul") or 0
    if info.get("tflops") and (of_matmul > of_copy or not info.get("gbs")):
        share = f"{100 * of_matmul:.1f} % of a matmul" if of_matmul else ""
        return f"{info['tflops']:.0f} TFLOP/s", peer, share
    rate = f"{(info['gbs'] + 1e-3) / 1000:.2f} TB/s" if info.get("gbs") else ""  # halves go up
    return rate, peer, f"{100 * of_copy:.1f} % of a copy" if of_copy else ""


# Support


class Generation(NamedTuple):
    """GPUs of one kind: their architecture, and the shared memory of a CTA and of an SM."""

    name: str
    arch: str
    smem_limits: tuple[int, int]


# CUDA C++ Programming Guide, "Compute Capabilities": 163, 99 or 227 KB of 164, 100 or 228.
GENERATIONS = (
    Generation("A100 (sm_80)", "sm_80", (163 << 10, 164 << 10)),
    Generation("RTX 30, 40, L40 (sm_86, sm_89)", "sm_89", (99 << 10, 100 << 10)),
    Generation("H100, H200 (sm_90)", "sm_90a", (227 << 10, 228 << 10)),
    Generation("B200 (sm_100)", "sm_100a", (227 << 10, 228 << 10)),
    Generation("RTX 50 (sm_120)", "sm_120a", (99 << 10, 100 << 10)),
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
    (256, 256): "to 256",
}


def kernels_of(
    generation: Generation, dtype: Any, dims: tuple[int, int], *, one_row: bool, paged: bool = True
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
                "decode", pages, True, rows, 4, 64, 64 * 1024, one_row, False, paged
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
            for tile in latent_tiles()
            if (tile.ckv == FLOAT8_E4M3) == fp8
            and runs_on(tile.kernel, generation.arch)
            and _tiles.ctas_per_sm(tile, 0)
        ]
    return tuple(dict.fromkeys(tile.kernel for tile in tiles))


def support() -> str:
    """Make the table of what runs where, from the specialisations that there are."""
    lines = [
        ("operation", "dtypes", "head_dim", *(generation.name for generation in GENERATIONS)),
        ("---",) * (3 + len(GENERATIONS)),
        ("`append`, `gather`", "fp32, fp16, bf16, fp8", "any", *("yes",) * len(GENERATIONS)),
        ("`copy_pages`", "all", "any", *("yes",) * len(GENERATIONS)),
        ("`merge_states`", "fp32, fp16, bf16", "any", *("yes",) * len(GENERATIONS)),
        ("page tables, masks", "", "", *("yes",) * len(GENERATIONS)),
        *_attention_lines(),
    ]
    for fp8, dtypes in ((False, "fp16, bf16"), (True, "ckv e4m3")):
        cells = (_cell(latent_kernels(generation, fp8)) for generation in GENERATIONS)
        lines.append(("MLA `decode`", dtypes, "512 + 64", *cells))
    return "".join(f"|{'|'.join(line)}|\n" if line[0] == "---" else _line(line) for line in lines)


def _line(cells: tuple[str, ...]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"


def _cell(kernels: tuple[str, ...]) -> str:
    return ", ".join(f"`{kernel}`" for kernel in kernels) or "no"


_CALLS: dict[str, dict[str, bool]] = {
    "`decode`": {"one_row": True},
    "`prefill`, paged": {"one_row": False},
    "`prefill`, ragged": {"one_row": False, "paged": False},
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
        yield (operation, names, "; ".join(labels), *cells)


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
    if arguments:
        bench, *peers = (read(Path(name)) for name in arguments)
        write_record(condensed(bench, peers[0] if peers else []), RECORD)
    path = TREE / "README.md"
    path.write_text(rewritten(path.read_text(encoding="utf-8"), read(RECORD)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
