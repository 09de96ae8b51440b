"""The tables of README.md: what they say is on record, and they say when nothing is."""

import copy
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import readme
from gpu_record import digest
from readme import GENERATIONS, condensed, kernels_of, microseconds, rewritten, speed
from test_notebooks import RUN, cells

from cukv._arrays import BFLOAT16, FLOAT8_E4M3

TREE = readme.TREE
GPU = {"device": "NVIDIA H200", "driver": "580.1", "nvrtc": "13.0"}
CASE = "decode/b64_kv8192_h32x8_p16"


def benchmark(name, seconds, **info):
    """One of pytest-benchmark's, with more than is kept of it."""
    return {
        "group": "decode",
        "name": name,
        "fullname": f"tests/bench/{name}",
        "params": {"shape": "UNSERIALIZABLE"},
        "extra_info": info,
        "stats": {"median": seconds, "iqr": 0.123456789e-6, "rounds": 15, "mean": seconds},
    }


def bench():
    """What a run on a GPU leaves behind."""
    decode = {"bytes": 2_148_532_224, "gbs": 4401.23456, "of_copy": 0.9971}
    decode |= {"flops": 8_589_934_592, "tflops": 17.6, "of_matmul": 0.024}
    prefill = {"bytes": 335_544_320, "gbs": 280.0, "of_copy": 0.064}
    prefill |= {"flops": 549_890_031_616, "tflops": 458.2, "of_matmul": 0.624}
    return {
        "datetime": "2027-01-02T03:04:05",
        "machine_info": {"gpu": GPU, "cpu": {"count": 16}},
        "commit_info": {"id": "abc"},
        "digest": digest(),
        "ceilings": {"copy": 4.414e12, "matmul": 7.341e14},
        "partial": None,
        "benchmarks": [
            benchmark("test_decode[b64_kv8192_h32x8_d128_p16]", 487.654321e-6, **decode),
            benchmark("test_ragged_prefill[b4_q4096_kv4096_h32x8_d128_p16]", 1.2e-3, **prefill),
            benchmark("test_decode_grows[kv_len=256]", 4e-6, **decode),
            benchmark("test_an_eager_call[decode]", 21.4e-6),
            benchmark("test_a_call_with_a_plan[decode]", 3.456e-6),
        ],
    }


def peers(agree=True):
    """A case of which the second backend of a peer is the fastest."""
    times = {"cukv_us": 480.0, "flashinfer_us": 500.0, "flashinfer-tc_us": 492.0, "cudnn_us": 999.0}
    times |= {"card-copy_us": 1.0, "flashinfer_host_us": 35.0, "cukv_host_plan_us": 10.0}
    return [
        {"case": CASE, **times, "ratio": 1.025, "agree": agree},
        {"case": "mla/x", "error": "?"},
    ]


def line(text, start):
    """Give the cells of the only line of a table that starts so."""
    (found,) = (x for x in text.splitlines() if x.startswith(start))
    return [cell.strip() for cell in found.strip("|").split("|")]


def words(text):
    """Join what is on lines of its own."""
    return " ".join(text.split())


def test_the_tables_of_the_readme_are_those_of_the_record():
    text = (readme.TREE / "README.md").read_text(encoding="utf-8")
    made = rewritten(text, readme.read(readme.RECORD))
    assert text == made, "README.md is not up to date: python tests/readme.py"


def test_benchmarks_that_were_skipped_leave_nothing_to_read(tmp_path):
    with pytest.raises(SystemExit, match="on a machine with a GPU"):
        readme.main([str(tmp_path / "bench.json")])
    with pytest.raises(SystemExit, match="on a machine with several GPUs and JAX for CUDA"):
        readme.main(["--devices", str(tmp_path / "devices.json")])


def test_a_table_says_what_was_measured_where():
    text = speed(condensed(bench(), []))
    said = words(text)
    assert said.startswith("One NVIDIA H200, driver 580.1, CUDA 13.0, clocks as found, 2027-01-02.")
    assert "a copy of device memory, 4.41 TB/s, or a product of matrices, 734 TFLOP/s." in said
    cells = line(text, "| `decode`")
    assert cells[0] == "`decode`"
    assert cells[1].startswith("64 x 8192 keys")
    assert cells[2:] == ["487.7 us", "4.40 TB/s", "100% of a copy"]
    assert line(text, "| `prefill`")[2:] == ["1200 us", "458 TFLOP/s", "62% of a matmul"]
    assert "`decode` 21.4 us (3.46 us with a plan made before)." in said
    assert "FlashInfer" not in text
    assert "test_" not in text


def test_what_is_asked_stands_beside_what_is_reached_whether_it_is_met_or_not():
    found = bench()
    for name, reached, asked, of in (
        ("test_cascade_of_a_random_prefix_tree[seed0_b8_pages300]", 1.2, 1.03, "of flat `decode`"),
        ("test_cascade_of_a_random_prefix_tree[seed1_b32_pages20]", 1.0, 1.03, "of flat `decode`"),
        ("test_four_rows_beside_one[b64]", 1.0315, 1.1, "of one row"),
        ("test_prefixes_of_4096_requests_of_1000_pages", 51.0, 50, "ms"),
    ):
        found["benchmarks"].append(benchmark(name, 1e-6, reached=reached, asked=asked, of=of))
    text = speed(condensed(found, []))
    reached = ["1.2", "at most 1.03 of flat `decode`", "1 of 2"]
    assert line(text, "| cascade `attend` | random")[2:] == reached
    assert line(text, "| `prefill` | 4 rows")[2:] == ["1.032", "at most 1.1 of one row", "yes"]
    assert line(text, "| `CascadeLevels.from")[2:] == ["51", "at most 50 ms", "no"]
    assert "asked" not in speed(condensed(bench(), []))


def test_a_run_that_was_cut_short_says_so():
    found = bench() | {"partial": "5 of 270 benchmarks were run"}
    said = words(speed(condensed(found, [])))
    assert "**The run was cut short: 5 of 270 benchmarks were run.**" in said
    assert "cut short" not in words(speed(condensed(bench(), [])))


def test_peers_are_compared_within_their_own_run():
    text = speed(condensed(bench(), peers()))
    assert line(text, "| `decode`")[5] == "FlashInfer, 1.02 x"
    assert line(text, "| `prefill`")[5] == ""
    assert "the answers agree" in words(text)


def test_peers_that_do_not_agree_are_refused():
    with pytest.raises(SystemExit, match=CASE):
        condensed(bench(), peers(agree=False))


def test_figures_of_other_kernels_say_so():
    record = condensed(bench(), [])
    assert "have changed since" not in words(speed(record))
    record["digest"] = record["digest"] | {"kernels": "0"}
    assert "**The kernels have changed since.**" in words(speed(record))


def test_without_a_record_there_are_no_figures():
    record = condensed(bench() | {"benchmarks": []}, [])
    assert "on record" in speed(record)
    assert "|" not in speed(record)


def devices():
    """What a run on two GPUs leaves behind."""
    found = bench()
    found["benchmarks"] = [
        benchmark(name, 5e-4, devices=2, one_us=950.0, reached=0.526, asked=0.555, of="of one")
        for name in readme.SEVERAL
    ]
    return found


def test_several_gpus_have_a_table_of_their_own():
    record = condensed(bench(), []) | {"devices": condensed(devices(), [])}
    text = speed(record)
    assert "On 2 NVIDIA H200 of one host, driver 580.1, CUDA 13.0, 2027-01-02. Wall" in words(text)
    assert line(text, "| 64 x 8192 keys | heads")[2:] == [
        "950.0 us",
        "500.0 us",
        "1.90",
        "1.80",
        "yes",
    ]
    record["devices"]["benchmarks"][1]["extra_info"]["reached"] = 0.6
    record["devices"]["digest"] = {}
    text = speed(record | {"benchmarks": []})  # without those of one
    assert line(text, "| 64 x 8192 keys | heads")[4:] == ["1.67", "1.80", "no"]
    assert "The kernels have changed since" in words(text)


def test_a_new_record_keeps_what_several_gpus_did_and_the_other_way_round(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    monkeypatch.setattr(readme, "RECORD", path)
    monkeypatch.setattr(readme, "TREE", tmp_path)
    (tmp_path / "README.md").write_text((TREE / "README.md").read_text(encoding="utf-8"))
    path.write_text('{"benchmarks": [], "peers": [], "devices": null}')
    for name, found in (("bench", bench()), ("devices", devices())):
        (tmp_path / name).write_text(json.dumps(found))
    want = condensed(bench(), []) | {"devices": condensed(devices(), [])}
    for arguments in (["--devices", "devices"], ["bench"], ["--devices", "devices"]):
        readme.main([str(tmp_path / a) if a[0] != "-" else a for a in arguments])
    assert readme.read(path) == want
    assert speed(want) in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_run_on_one_gpu_is_not_taken_for_one_on_several(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    monkeypatch.setattr(readme, "RECORD", path)
    path.write_text("before")
    (tmp_path / "bench").write_text(json.dumps(bench()))
    with pytest.raises(SystemExit, match=r"not measured on several GPUs.*test_heads_over_devices"):
        readme.main(["--devices", str(tmp_path / "bench")])
    assert path.read_text() == "before"


def test_a_rehearsal_is_no_record():
    found = bench()
    found["machine_info"]["gpu"] = {"device": "none: rehearsed"}
    with pytest.raises(SystemExit, match="none: rehearsed"):
        condensed(found, [])


def test_a_record_keeps_what_is_shown_one_benchmark_a_line(tmp_path):
    record = condensed(bench(), peers())
    assert set(record["benchmarks"][0]) == {"group", "name", "extra_info", "stats"}
    assert record["benchmarks"][0]["stats"] == {"median": 487.65e-6, "iqr": 1.2346e-7, "rounds": 15}
    assert record["benchmarks"][0]["extra_info"]["gbs"] == 4401.2
    path = tmp_path / "record.json"
    readme.write_record(record, path)
    assert json.loads(path.read_text(encoding="utf-8")) == record
    assert sum("test_decode[" in line for line in path.read_text().splitlines()) == 1
    # It can be condensed again: a record is in the structure of what it was made of.
    assert condensed(copy.deepcopy(record), record["peers"]) == record


def test_the_notebook_draws_a_record(tmp_path):
    if find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    path = tmp_path / "tests" / "bench" / "record.json"
    path.parent.mkdir(parents=True)
    readme.write_record(condensed(bench(), []), path)
    sources = cells(readme.TREE / "notebooks" / "04_roofline.ipynb", "code")
    count = "print('lines:', [len(a.lines) + len(a.patches) for n in plt.get_fignums()"
    sources.append(f"{count} for a in plt.figure(n).axes])")
    run = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(sources),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(readme.TREE), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "5 benchmarks of NVIDIA H200 on 2027-01-02" in run.stdout
    # The roof, 8 calls and a group of dots; two bars and 1; a kernel's times and floors.
    assert "lines: [10, 3, 0, 2, 0, 0]" in run.stdout


def test_every_line_of_the_table_is_a_benchmark():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/bench"]
    run = subprocess.run(command, cwd=readme.TREE, capture_output=True, text=True, check=True)
    names = {line.partition("::")[2] for line in run.stdout.splitlines()}
    rows = list(readme.rows())
    assert {row.benchmark for row in rows} | readme.SEVERAL.keys() <= names
    for wanted in (rows, [row.case for row in rows if row.case]):
        assert len(set(wanted)) == len(wanted)


@pytest.mark.parametrize(
    ("us", "want"),
    [(2.4, "2.40 us"), (17.93, "17.9 us"), (999.96, "1000.0 us"), (3789.9, "3790 us")],
)
def test_times_have_as_many_digits_as_they_were_measured_with(us, want):
    assert microseconds({"stats": {"median": us * 1e-6}}) == want


# Support


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT8_E4M3], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda each: each.arch)
def test_every_generation_serves_the_usual_head_dims(generation, dim, dtype, one_row, aligned):
    kernels = kernels_of(generation, dtype, (dim, dim), one_row=one_row, aligned=aligned)
    assert kernels or not aligned  # rows that are not aligned need more shared memory


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_has_kernels_of_its_own_and_no_other_gpu_does(dim):
    for generation in GENERATIONS:
        for dtype, dims in ((BFLOAT16, (64, 128, 256)), (FLOAT8_E4M3, (128,))):
            kernels = kernels_of(generation, dtype, (dim, dim), one_row=False)
            wanted = generation.arch == "sm_90a" and dim in dims
            assert ("prefill_sm90" in kernels) == wanted
