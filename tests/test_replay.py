import json
import os
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cukv
from cukv import _engine, replay
from cukv.__main__ import main
from cukv._workload import (
    SEGMENT,
    FreePages,
    Limits,
    ReplayError,
    Request,
    Scheduler,
    built_in,
    read_trace,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LIMITS = Limits(batch_size=4, chunk_tokens=128, step_tokens=192)
SMALL = ["replay", "--device", "cpu", "--requests", "4", "--steps", "24"]


def mooncake(*requests, **changes):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    entries = (dict(zip(names, request, strict=True)) | changes for request in requests)
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def write(folder, text):
    path = folder / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def scheduler(requests, max_num_pages, page_size=16, limits=LIMITS):
    return Scheduler(requests, FreePages(max_num_pages), page_size, limits)


def run(schedule, steps=100_000):
    """Yield the batch of each step until nobody is left."""
    while not schedule.done:
        batch = schedule.next_batch()
        yield batch
        schedule.end_step()
        steps -= 1
        assert steps, "the schedule does not end"


# Reading


def test_a_mooncake_trace_keeps_lengths_and_the_ids_of_whole_segments(tmp_path):
    text = mooncake((0, 1024, 5, [7, 8]), (3000, 1023, 0, [7, 9]), (3000, 100, 1, [4]))
    path = write(tmp_path, text)
    requests, held = read_trace(path, 10)
    assert held == 3
    assert requests == [
        Request(f"{path}:1", 1024, 5, (7, 8)),
        Request(f"{path}:2", 1023, 0, (7,)),
        Request(f"{path}:3", 100, 1, ()),
    ]


# With and without a byte-order mark; LF and CRLF; blank lines; columns in another order.
@pytest.mark.parametrize(
    "text",
    [
        AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n",
        "\ufeff" + AZURE + "\r\nx,374,44\r\n\r\nx,396,0",
        "GeneratedTokens,More,ContextTokens\n44,,374\n0,'x',\"396\"\n",
    ],
    ids=["plain", "bom-crlf", "reordered"],
)
def test_an_azure_trace_is_told_by_its_header(tmp_path, text):
    requests, held = read_trace(write(tmp_path, text), 10)
    assert [(r.input_length, r.output_length, r.hash_ids) for r in requests] == [
        (374, 44, ()),
        (396, 0, ()),
    ]
    assert held == 2


def test_the_limit_bounds_the_requests_but_the_whole_file_is_checked(tmp_path):
    path = write(tmp_path, AZURE + "x,1,1\n" * 5)
    requests, held = read_trace(path, 2)
    assert (len(requests), held) == (2, 5)
    with pytest.raises(ReplayError, match=r":7: ContextTokens must be"):
        read_trace(write(tmp_path, AZURE + "x,1,1\n" * 5 + "x,-1,1\n"), 2)


GOOD = mooncake((0, 600, 5, [7, 8]))

# Empty, neither format, half a line, wrong types of every kind, wrong counts, not text at all.
BAD_FILES = {
    "empty": ("", ":1: the file is empty"),
    "blank": ("\n \n\n", ":1: the file is empty"),
    "header-only": (AZURE, ":1: a header and no request"),
    "other-text": ("hello\n", ":1: neither a Mooncake JSON object nor an Azure header"),
    "other-csv": ("a,b\n1,2\n", ":1: neither"),
    "json-array": ('[{"input_length": 3, "output_length": 1}]', ":1: neither"),
    "binary": (b"\x7fELF\x02\x01\x01\0\0\xff\xfe\n", ":1: not UTF-8 text"),
    "zeros": (bytes(100), ":1: neither"),
    "late-binary": (GOOD.encode() + b"\xff\n", ":2: not UTF-8 text"),
    "cut-json": (GOOD + GOOD[:30] + "\n", ":2: not a JSON object"),
    "deep-json": (GOOD + '{"a":' * 100_000 + "\n", ":2: not a JSON object"),
    "digits-json": ('{"input_length": ' + "9" * 5000 + "}\n", ":1: "),
    "json-list": (GOOD + "[1, 2]\n", ":2: must be a JSON object"),
    "csv-after-json": (GOOD + "x,1,1\n", ":2: not a JSON object"),
    "no-length": ('{"output_length": 3}\n', ":1: input_length must be a whole number"),
    "null": (mooncake((0, None, 5, [])), ":1: input_length"),
    "zero-input": (GOOD + mooncake((0, 0, 5, [])), ":2: input_length"),
    "negative-input": (GOOD + mooncake((0, -3, 5, [])), ":2: input_length"),
    "negative-output": (GOOD + mooncake((0, 3, -5, [])), ":2: output_length"),
    "nan": (mooncake((0, float("nan"), 5, [])), ":1: input_length"),
    "infinite": (mooncake((0, 4, float("inf"), [])), ":1: output_length"),
    "bool": (mooncake((0, True, 5, [])), ":1: input_length"),
    "float": (mooncake((0, 3.0, 5, [])), ":1: input_length"),
    "text": (mooncake((0, "3", 5, [])), ":1: input_length"),
    "huge": (mooncake((0, 10**30, 5, [])), ":1: input_length"),
    "ids-no-list": (mooncake((0, 600, 5, "abc")), ":1: hash_ids must be a list"),
    "ids-bool": (mooncake((0, 600, 5, [True])), ":1: hash_ids must be a list"),
    "ids-float": (mooncake((0, 600, 5, [1.5])), ":1: hash_ids must be a list"),
    "ids-too-many": (mooncake((0, 600, 5, [1, 2, 3])), ":1: hash_ids must name at most the 2"),
    "csv-short": (AZURE + "x,1\n", ":2: must have 3 fields, got 2"),
    "csv-quote": (AZURE + 'x,"1,1\n', ":2: not a CSV line"),
    "csv-zero": (AZURE + "x,1,1\nx,0,1\n", ":3: ContextTokens"),
    "csv-negative": (AZURE + "x,1,-1\n", ":2: GeneratedTokens"),
    "csv-float": (AZURE + "x,1.0,1\n", ":2: ContextTokens"),
    "csv-nan": (AZURE + "x,nan,1\n", ":2: ContextTokens"),
    "csv-bool": (AZURE + "x,True,1\n", ":2: ContextTokens"),
    "csv-nothing": (AZURE + "x,,1\n", ":2: ContextTokens"),
    "csv-underscore": (AZURE + "x,1_0,1\n", ":2: ContextTokens"),
    "csv-digits": (AZURE + "x," + "9" * 5000 + ",1\n", ":2: ContextTokens"),
    "too-long": (mooncake((0, 2**31 - 1, 5, [])), ":1: does not fit"),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_trace_is_one_line_with_its_place_and_status_2(tmp_path, capsys, text, message):
    path = write(tmp_path, text)
    assert main([*SMALL, "--trace", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert len(err) < 400
    assert f"cukv: {path}{message}" in err


def test_a_trace_that_cannot_be_opened_is_one_line_and_status_2(tmp_path, capsys, monkeypatch):
    def fails_with(path, message):
        assert main([*SMALL, "--trace", str(path)]) == 2
        assert capsys.readouterr().err == f"cukv: {path}: {message}\n"

    fails_with(tmp_path / "nowhere", "No such file or directory")
    fails_with(tmp_path, "Is a directory")
    path = write(tmp_path, GOOD)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    fails_with(path, "Permission denied")


BAD_ARGUMENTS = {
    "nothing": ([], "required"),
    "unknown-command": (["reply"], "invalid choice"),
    "requests-0": (["replay", "--requests", "0"], "argument --requests: must be in [1, "),
    "requests-negative": (["replay", "--requests", "-1"], "argument --requests: must be in [1, "),
    "steps-text": (["replay", "--steps", "many"], "argument --steps: must be a whole number"),
    "steps-float": (["replay", "--steps", "1.5"], "argument --steps: must be a whole number"),
    "page-size-0": (["replay", "--page-size", "0"], "argument --page-size: must be in [1, "),
    "seed-negative": (["replay", "--seed", "-1"], "argument --seed: must be in [0, "),
    "pages-huge": (["replay", "--pages", "9" * 99], "argument --pages: must be in [1, "),
    "pages-endless": (["replay", "--pages", "9" * 999], "argument --pages: must be a whole number"),
    "model": (["replay", "--model", "gpt"], "argument --model: invalid choice: 'gpt'"),
    "device": (["replay", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    "layers": ([*SMALL, "--layers", "3"], "--layers must be at most 2 for tiny, got 3"),
    "unknown-option": (["replay", "--speed"], "unrecognized arguments: --speed"),
    "no-room": ([*SMALL, "--pages", "2"], "built-in request 1: does not fit: "),
    "common-prompt": ([*SMALL, "--common-prompt", "100"], "--common-prompt: must be in 512s, got"),
    "common-prompt-of-a-trace": (
        [*SMALL, "--common-prompt", "512", "--trace", "x"],
        "--common-prompt: is for the built-in workload, got 512",
    ),
    "page-too-large": (
        [*SMALL, "--page-size", "2147483647"],
        "does not fit: 619 tokens take 550 GB of pages, and 1.07 GB are for the cache",
    ),
}


@pytest.mark.parametrize(("argv", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line_and_status_2(capsys, argv, message):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cukv: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_gpu_that_is_asked_for_and_missing_is_one_line_and_status_2(capsys, monkeypatch):
    monkeypatch.setattr(cukv, "is_available", lambda: False)
    assert main(["replay", "--device", "gpu"]) == 2
    assert "--device gpu: no NVIDIA GPU" in capsys.readouterr().err


# Pages and the schedule


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 20))
def test_the_free_list_never_hands_out_a_page_that_somebody_holds(moves, max_num_pages):
    free, holders = FreePages(max_num_pages), []  # holders: one list of pages per holder
    for move in moves:
        if move >= 4 and holders:  # a second holder of the same pages
            free.hold(holders[-1])
            holders.append(list(holders[-1]))
        elif move == 3 and holders:
            gone = holders.pop(0)
            assert set(free.release(gone)) == set(gone) - {p for pages in holders for p in pages}
        elif move <= len(free):
            held = {page for pages in holders for page in pages}
            taken = free.take(move)
            assert len(set(taken)) == move
            assert held.isdisjoint(taken)
            holders.append(taken)
        held = {page for pages in holders for page in pages}
        assert len(free) == max_num_pages - len(held)


def test_a_page_is_freed_once():
    free = FreePages(4)
    pages = free.take(2)
    assert sorted(free.release(pages)) == sorted(pages)
    with pytest.raises(RuntimeError, match="is free already"):
        free.release(pages[:1])
    with pytest.raises(RuntimeError, match="5 pages asked, 4 free"):
        free.take(5)


ONE_CHUNK = Limits(batch_size=4, chunk_tokens=SEGMENT, step_tokens=SEGMENT)


def test_a_resident_segment_is_shared_by_reference_and_freed_with_its_last_holder():
    first = Request("first", 2 * SEGMENT, 60, (7, 8))
    second = Request("second", 2 * SEGMENT, 90, (7, 9))
    schedule = scheduler([first, second], 200, limits=ONE_CHUNK)
    segment, shared = SEGMENT // 16, set()
    for _ in run(schedule):
        if len(schedule.live) == 2:
            one, other = schedule.live
            shared = set(one.pages) & set(other.pages)
        else:  # the first is gone; the second still holds the segment
            assert shared == set(schedule.live[0].pages[:segment])
            assert schedule.pages_in_use == len(schedule.live[0].pages)
    assert len(shared) == segment
    assert schedule.tokens_by_reference == SEGMENT
    assert len(schedule.free) == 200


def test_later_requests_take_whole_segments_by_reference_and_append_the_rest():
    first = Request("first", 2 * SEGMENT, 400, (7, 8))
    same = [Request(f"same {i}", 2 * SEGMENT + 16, 4, (7, 8)) for i in range(3)]
    schedule = scheduler([first, *same], 400, limits=ONE_CHUNK)
    rows = sum(live.rows for batch in run(schedule) for live in batch)
    assert schedule.tokens_by_reference == 3 * 2 * SEGMENT
    assert rows == first.total_length + 3 * 20
    assert len(schedule.free) == 400


def test_a_segment_that_is_being_written_is_not_shared():
    requests = [Request(str(i), SEGMENT, 1, (7,)) for i in range(2)]
    schedule = scheduler(requests, 80)
    assert sum(live.rows for batch in run(schedule) for live in batch) == 2 * (SEGMENT + 1)
    assert len(schedule.free) == 80


def test_a_segment_that_nobody_holds_any_more_is_written_again():
    requests = [Request(str(i), SEGMENT, 1, (7,)) for i in range(2)]
    schedule = scheduler(requests, 40, limits=ONE_CHUNK)  # room for one at a time
    assert sum(live.rows for batch in run(schedule) for live in batch) == 2 * (SEGMENT + 1)
    assert schedule.tokens_by_reference == 0


def test_pages_that_do_not_divide_a_segment_share_nothing():
    schedule = scheduler([Request(str(i), SEGMENT, 1, (7,)) for i in range(3)], 99, page_size=48)
    assert sum(live.rows for batch in run(schedule) for live in batch) == 3 * (SEGMENT + 1)
    assert not schedule.shares


REQUESTS = st.builds(
    lambda tokens, output, ids: Request("x", tokens, output, tuple(ids[: tokens // SEGMENT])),
    st.integers(1, 3 * SEGMENT),
    st.integers(0, 40),
    st.lists(st.integers(0, 2), max_size=3),
)


@given(st.lists(REQUESTS, min_size=1, max_size=8), st.sampled_from([1, 16, 48, 512, 1000]))
def test_every_schedule_serves_all_tokens_within_its_limits(requests, page_size):
    max_num_pages = max(-(-r.total_length // page_size) for r in requests) + 3
    schedule = scheduler(requests, max_num_pages, page_size)
    served = schedule.tokens_by_reference
    for batch in run(schedule):
        rows = [live.rows for live in batch]
        assert sum(rows) <= LIMITS.step_tokens
        assert len(schedule.live) <= LIMITS.batch_size
        assert max(rows, default=0) <= LIMITS.chunk_tokens
        assert rows == sorted(rows, key=lambda n: n > 1)
        for live in batch:
            assert len(live.pages) == -(-live.kv_len // page_size)
            written = live.pages[(live.kv_len - live.rows) // page_size :]
            others = [other.pages for other in schedule.live if other is not live]
            assert set(written).isdisjoint(chain(*others))
        served += sum(rows)
    assert served + schedule.tokens_by_reference == sum(r.total_length for r in requests)
    assert schedule.finished == len(requests)
    assert len(schedule.free) == max_num_pages


def test_the_built_in_workload_is_decided_by_its_seed():
    assert built_in(3, 20, 100, 10) == built_in(3, 20, 100, 10)
    assert built_in(3, 20, 100, 10) != built_in(4, 20, 100, 10)
    assert any(request.hash_ids for request in built_in(3, 20, 100, 10))


def test_a_common_prompt_stands_before_every_built_in_request():
    without, common = built_in(3, 20, 100, 10), built_in(3, 20, 100, 10, 2 * SEGMENT)
    for request, longer in zip(without, common, strict=True):
        assert longer.hash_ids == tuple(range(2 + len(request.hash_ids)))
        assert longer.input_length == 2 * SEGMENT + request.input_length
        assert longer.output_length == request.output_length


# The job


@pytest.mark.parametrize("page_size", ["1", "16", "48", "1024"])
def test_the_job_runs_on_numpy_and_checks_itself(capsys, page_size):
    assert main([*SMALL, "--page-size", page_size]) == 0
    out = capsys.readouterr().out
    assert "on NumPy, in float64" in out
    for name in ("append", "plan", "decode", "prefill", "gather"):
        calls = next(line for line in out.splitlines() if line.startswith(name)).split()[1]
        assert int(calls) > 0
    assert "all returned" in out
    assert "gathered rows bit for bit" in out


@pytest.mark.parametrize("model", ["llama8b", "deepseek"])
def test_larger_models_run_on_numpy_too(capsys, model):
    assert main(["replay", "--device", "cpu", "--model", model, "--steps", "9"]) == 0
    assert "bfloat16; 1 of" in capsys.readouterr().out


@pytest.mark.parametrize("layers", ["1", "2"])
def test_a_trace_with_shared_segments_runs_on_numpy(tmp_path, capsys, layers):
    prompts = [(0, 530 + i, 3, [0, i + 1]) for i in range(4)]
    path = write(tmp_path, mooncake((0, 700, 20, [0, 99]), *prompts))
    assert main(["replay", "--device", "cpu", "--trace", str(path), "--layers", layers]) == 0
    out = capsys.readouterr().out
    assert "5 of 5 requests" in out
    assert "5 requests finished, 0 live, 0 waiting" in out
    by_reference = out.partition(" taken by reference")[0].split()[-1].replace(",", "")
    assert int(by_reference) >= 2 * SEGMENT


def replayed(*requests):
    """Replay requests on NumPy to their end: the engine."""
    options = replay.Options(device="cpu")
    stopwatch = replay.Stopwatch(np)
    engine = replay.build(options, "tiny", replay.NUMPY_SIZE, list(requests), stopwatch)
    replay.run(engine, 1000)
    return engine


def test_decode_steps_over_shared_pages_read_these_once():
    sharers = [Request(str(i), SEGMENT + 90, 20 + i, (7,)) for i in range(3)]
    decoded = replayed(*sharers).decoded
    token_bytes = 2 * 2 * 32 * 2
    assert decoded["cascades"] >= 18
    assert decoded["saved"] % (SEGMENT * token_bytes) == 0
    runs_saved = decoded["saved"] // (SEGMENT * token_bytes)
    assert decoded["cascades"] < runs_saved <= 2 * decoded["cascades"]
    others = [Request(str(i), SEGMENT + 90, 20 + i, (i,)) for i in range(3)]
    decoded = replayed(*others).decoded
    assert decoded["steps"] > 0
    assert not decoded["cascades"]
    assert not decoded["saved"]


def test_the_job_says_what_cascades_saved(capsys):
    assert main([*SMALL, "--common-prompt", "1024"]) == 0
    out = capsys.readouterr().out
    assert "a common prompt of 1,024 tokens" in out
    assert "decode steps were cascades, which saved 0." in out
    assert int(next(line for line in out.splitlines() if line.startswith("cascade")).split()[1])


def shifted(append):
    def wrong(self, k, v, table, *, indptr):
        append(self, np.roll(k, 1, axis=0), v, table, indptr=indptr)

    return wrong


def lost(append):
    def wrong(self, k, v, table, *, indptr):
        append(self, np.zeros_like(k), v, table, indptr=indptr)

    return wrong


def swapped(append):
    def wrong(self, k, v, table, *, indptr):
        append(self, v, k, table, indptr=indptr)

    return wrong


@pytest.mark.parametrize("fault", [shifted, lost, swapped])
def test_the_check_notices_rows_in_the_wrong_place(capsys, monkeypatch, fault):
    monkeypatch.setattr(cukv.PagedKVCache, "append", fault(cukv.PagedKVCache.append))
    assert main(SMALL) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "gathered rows are not those appended" in err


def one_key_less(attend):
    def wrong(self, q, table, **options):
        indptr, last = table.indptr, np.maximum(table.last_page_len - 1, 1)
        return attend(
            self, q, cukv.PageTable(indptr, table.indices, last, table.page_size), **options
        )

    return wrong


def test_the_check_notices_a_level_that_is_missing(capsys, monkeypatch):
    attend = cukv.CascadeLevels.attend

    def without_root(self, q, cache, **options):
        levels = cukv.CascadeLevels(self.qo_indptr[1:], self.tables[1:], self.row_order)
        return attend(levels, q, cache, sm_scale=options["sm_scale"])

    monkeypatch.setattr(cukv.CascadeLevels, "attend", without_root)
    monkeypatch.setattr(replay, "CHECK_EVERY", 1)
    assert main([*SMALL, "--common-prompt", "512"]) == 1
    assert "cascade of token" in capsys.readouterr().err


def not_causal(attend):
    return lambda self, q, table, sm_scale, **_: attend(self, q, table, sm_scale=sm_scale)


def not_a_number(attend):
    return lambda *args, **options: attend(*args, **options) * np.float16("nan")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("decode", one_key_less),
        ("decode", not_a_number),
        ("prefill", not_causal),
        ("prefill", one_key_less),
    ],
)
def test_the_check_notices_wrong_attention(capsys, monkeypatch, name, fault):
    monkeypatch.setattr(cukv.PagedKVCache, name, fault(getattr(cukv.PagedKVCache, name)))
    monkeypatch.setattr(replay, "CHECK_EVERY", 1)
    assert main(SMALL) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{name} of token" in err


def test_a_page_that_does_not_come_back_is_noticed(capsys, monkeypatch):
    release = FreePages.release
    monkeypatch.setattr(FreePages, "release", lambda self, pages: release(self, pages[1:]))
    assert main([*SMALL, "--steps", "1000"]) == 1
    assert "did not come back" in capsys.readouterr().err


def test_an_operation_without_a_kernel_is_said_to_have_none():
    stopwatch = replay.Stopwatch(np)

    def attend():
        raise NotImplementedError

    assert stopwatch("decode", attend, tokens=1) is None
    assert stopwatch("decode", lambda: 1 / 0, tokens=1) is None  # not called any more
    assert "decode      has no kernel yet" in replay.table(stopwatch, 0.0)


def test_control_c_ends_quietly_with_130(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(_engine.Engine, "step", interrupt)
    assert main(SMALL) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "cukv", "info"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["info"], [*SMALL, "--steps", "1"]])
def test_output_that_cannot_be_written_is_no_wrong_result(arguments):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cukv", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, b"cukv: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("arguments", [["info"], [*SMALL, "--steps", "1"]])
def test_a_stream_that_is_closed_is_not_written(arguments, closed):
    command = shlex.join([sys.executable, "-m", "cukv", *arguments])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} {closed}"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed == "2>&-")


def test_importing_the_job_touches_no_gpu(monkeypatch):
    for name in ("cukv.replay", "cukv._engine"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(replay.cp.cuda, "is_available", lambda: 1 / 0)
    monkeypatch.setattr(replay.cp.cuda.runtime, "getDeviceCount", lambda: 1 / 0)
    __import__("cukv.replay")


def test_info_prints_one_aligned_line_per_fact(capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("cukv", "gpu", "driver", "nvrtc", "cache folder", "kernels")
    for name in names:
        assert any(line.startswith(f"{name:12}  ") and len(line) > 14 for line in lines)


@pytest.mark.gpu
def test_the_job_runs_cascades_on_a_gpu(capsys):
    argv = ["replay", "--device", "gpu", "--requests", "64", "--steps", "60", "--layers", "1"]
    assert main([*argv, "--common-prompt", "8192"]) == 0
    out = capsys.readouterr().out
    assert "decode steps were cascades, which saved" in out
    assert "cascade rows" in out


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny", "llama8b", "deepseek"])
def test_the_job_runs_on_a_gpu_and_checks_itself(capsys, model):
    argv = ["replay", "--device", "gpu", "--model", model, "--requests", "24", "--steps", "60"]
    assert main([*argv, "--layers", "2"]) == 0
    out = capsys.readouterr().out
    assert "of copy" in out
    assert "gathered rows bit for bit" in out
    assert "all returned" in out
