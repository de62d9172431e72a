"""The reader of measured runs: every column read, blanks None, mistakes located, hostile files refused."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.measure import Run, read_runs, shipped_runs, validate


def _write(tmp_path, text, name="runs.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_shipped_table_has_three_sources_and_no_prose():
    table = shipped_runs()
    count: dict[str, int] = {}
    for run in table.runs:
        count[run.group] = count.get(run.group, 0) + 1
    assert count == {"simumax": 27, "llmfoundry": 139, "nanotron": 14}
    assert table.unused_columns == ()
    assert all(run.source and run.measured_s for run in table.runs)


def test_a_row_reads_as_published():
    run = next(run for run in shipped_runs().runs if run.id == "simumax-0001")
    assert (run.layers, run.hidden, run.ffn, run.heads, run.kv_heads, run.vocab) == (12, 8192, 28672, 64, 8, 128256)
    assert (run.tp, run.pp, run.dp, run.mbs, run.gbs, run.sp) == (1, 2, 4, 1, 16, 0)
    assert run.measured_s == 0.843
    assert run.measured_bytes == int(66.55 * 2**30)  # GiB where allocated
    assert run.tied_embeddings is None  # blank: not stated
    assert run.max_allocated_mib is not None
    assert max(int(n) for n in run.max_allocated_mib.split("/")) / 1024 == pytest.approx(66.55, abs=0.01)


def test_the_step_time_is_published_or_follows_from_throughput():
    base = {"id": "a-1", "gbs": 8, "seq": 1000, "gpus": 4, "tokens_per_s_per_gpu": 500.0}
    assert Run(**base).measured_s == pytest.approx(8 * 1000 / (500 * 4))
    assert Run(**base, d_step_time_s=3.0).measured_s == 3.0
    assert Run(**base, d_step_time_s=3.0, step_time_s=2.0).measured_s == 2.0
    assert Run(id="a-1").measured_s is None


def test_memory_is_binary_only_where_it_says_so():
    assert Run(id="a-1", peak_mem_gb=2.0, mem_kind="unknown").measured_bytes == 2_000_000_000
    assert Run(id="a-1", peak_mem_gb=2.0, mem_kind="allocated").measured_bytes == 2 << 30
    assert Run(id="a-1", peak_mem_gb=2.0, mem_kind="reserved", peak_mem_kind="Memory(GiB)").measured_bytes == 2 << 30
    assert Run(id="a-1").measured_bytes is None
    assert Run(id="a-1").memory_kind is None
    assert Run(id="a-1", peak_mem_gb=2.0, peak_mem_kind="Peak Mem MiB/1024").measured_bytes == 2 << 30
    # nanotron's log counts in GiB, of what was reserved.
    nanotron = Run(id="a-1", peak_mem_gb=2.0, mem_kind="unknown", framework="nanotron v0.5")
    assert (nanotron.measured_bytes, nanotron.memory_kind) == (2 << 30, "reserved")
    picotron = Run(id="a-1", peak_mem_gb=2.0, mem_kind="unknown", framework="Picotron")
    assert (picotron.measured_bytes, picotron.memory_kind) == (2_000_000_000, "unknown")


def test_other_columns_are_counted_as_unused(tmp_path):
    table = read_runs(_write(tmp_path, "id,remarks,tp\nx-1,hello,2\n\nx-2,,\n"))
    assert table.unused_columns == ("remarks",)
    assert [(run.id, run.tp) for run in table.runs] == [("x-1", 2), ("x-2", None)]


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("id,tp\na-1,two\n", "line 2, column tp", "finite number"),
        ("id,tp\na-1,2.5\n", "line 2, column tp", "whole number"),
        ("id,tp\na-1,0\n", "line 2, column tp", "above 0"),
        ("id,tp\na-1,-3\n", "line 2, column tp", "above 0"),
        ("id,zero\na-1,-1\n", "line 2, column zero", "0 or more"),
        ("id,dist_opt\na-1,2\n", "line 2, column dist_opt", "0 or 1"),
        ("id,step_time_s\na-1,nan\n", "line 2, column step_time_s", "finite"),
        ("id,step_time_s\na-1,1e400\n", "line 2, column step_time_s", "finite"),
        ("id,gbs\na-1,1e30\n", "line 2, column gbs", "more than 1,000,000,000"),
        ("id,layers\na-1,10001\n", "line 2, column layers", "more than 10,000"),
        ("id,gpus\na-1,99999999\n", "line 2, column gpus", "more than 1,048,576"),
        ("id,peak_mem_gb\na-1,1e-300\n", "line 2, column peak_mem_gb", "above 0"),
        ("id,tp\na-1,0.5\n", "line 2, column tp", "whole number"),
        ("id,mem_kind\na-1,guessed\n", "line 2, column mem_kind", "use one of allocated"),
        ("id,tp\na-1,1\na-1,2\n", "line 3, column id", "already"),
        ("id,tp\n,1\n", "line 2, column id", "blank"),
        ("id,tp\na-1\n", "line 2", "cells"),
        ("name,tp\na-1,1\n", "line 1", "no column id"),
        ("id,tp,tp\na-1,1,2\n", "line 1", "twice"),
        ('id,model\na-1,"open\n', "line 2", "quoting"),
        ("", "line 1", "no column id"),
        (b"id,model\na-1,\xff\n", "line 2", "UTF-8"),
        (f"id,notes\na-1,{'x' * 30_000}\n", "column notes", "characters"),
        (f"id,gpu\na-1,{'H100 96GB ' * 110}\n", "column gpu", "characters"),
        (f"id,model\na-1,{'x' * 200_000}\n", "line 2", "quoting"),
    ],
)
def test_mistakes_are_located(tmp_path, text, where, problem):
    with pytest.raises(FivefoldError) as caught:
        read_runs(_write(tmp_path, text))
    assert where in caught.value.message
    assert problem in caught.value.message
    assert caught.value.code == "bad-measured-runs"
    assert len(caught.value.message) < 1000


def test_a_row_with_a_mistake_is_left_out_where_that_is_asked(tmp_path):
    text = "id,tp,recompute_kind\na-1,two,\na-2,1,Full\na-2,2,\na-3\n,4,\na-4,2,partial\n"
    table = read_runs(_write(tmp_path, text), leave_out_mistakes=True)
    assert [(run.id, run.recompute_kind) for run in table.runs] == [("a-2", "full")]
    assert [row.id for row in table.unread] == ["a-1", "a-2", "a-3", "line 6", "a-4"]
    assert "line 2, column tp" in table.unread[0].reason
    report = validate(table)
    assert report.rows_total == 6
    assert {row.id for row in report.skipped} == {"a-1", "a-2", "a-3", "line 6", "a-4"}


def test_numbers_as_people_write_them(tmp_path):
    row = read_runs(_write(tmp_path, 'id,gpus,sp,gbs\na-1,"1,024",True,512.0\n')).runs[0]
    assert (row.gpus, row.sp, row.gbs) == (1024, 1, 512)


@pytest.mark.parametrize(
    ("column", "cell", "number"),
    [
        ("seq", "4k", 4096), ("seq", "8K tokens", 8192), ("seq", "8,192", 8192), ("gbs", "4M tokens", 4 << 20),
        ("gbs", "512 (4M tokens)", 512), ("gpus", "64 (8x8)", 64), ("vpp", "2 (interleaved)", 2), ("vpp", "0", 1),
        ("ep", "0", 1), ("ep", "n/a", None), ("dp", "-", None), ("vocab", "32k", 32_000), ("params_b", "350M", 0.35),
        ("params_b", "8B", 8), ("params_b", "1T", 1000), ("zero", "ZeRO-1", 1), ("zero", "stage 3", 3), ("sp", "on", 1),
        ("dist_opt", "off", 0), ("step_time_s", "843 ms", 0.843), ("step_time_s", "~1.2s", 1.2),
        ("peak_mem_gb", "61440 MiB", 60), ("peak_mem_gb", "60 GB", 60), ("tokens_per_s_per_gpu", "12.5k", 12_500),
    ],
)  # fmt: skip
def test_numbers_with_their_multiples_units_and_remarks(tmp_path, column, cell, number):
    row = read_runs(_write(tmp_path, f'id,{column}\na-1,"{cell}"\n')).runs[0]
    assert getattr(row, column) == (number if number is None else pytest.approx(number))


@pytest.mark.parametrize(
    ("column", "cell", "problem"),
    [
        ("gbs", "65536 tokens", "counts tokens"), ("mbs", "8K tok", "counts tokens"),
        ("peak_mem_gb", "12 t", "finite number"), ("step_time_s", "80 m", "finite number"),
        ("zero", "stage 12", "finite number"), ("zero", "zero" + "-" * 19_000, "finite number"),
    ],
)  # fmt: skip
def test_numbers_of_another_thing_are_a_mistake(tmp_path, column, cell, problem):
    with pytest.raises(FivefoldError, match=problem):
        read_runs(_write(tmp_path, f"id,{column}\na-1,{cell}\n"))


@pytest.mark.parametrize("cell", ["60 GiB", "61440 MiB", "60GiB (nvidia-smi)"])
def test_memory_is_binary_where_its_cell_says_so(tmp_path, cell):
    row = read_runs(_write(tmp_path, f"id,peak_mem_gb,peak_mem_kind\na-1,{cell},peak\n")).runs[0]
    assert row.measured_bytes == 60 << 30
    assert read_runs(_write(tmp_path, "id,peak_mem_gb\na-1,60 GB\n")).runs[0].measured_bytes == 60e9


@pytest.mark.parametrize("cell", ["two", "4k x", "1-2", "2/4", "k", "~", "(4)", "0x10", "zero"])
def test_what_is_no_number_is_still_a_mistake(tmp_path, cell):
    with pytest.raises(FivefoldError, match="finite number"):
        read_runs(_write(tmp_path, f"id,tp\na-1,{cell}\n"))


@pytest.mark.parametrize(
    ("column", "cell", "word"),
    [
        ("precision_kind", "FP8-hybrid", "fp8"), ("precision_kind", "bf16-mixed", "bf16"),
        ("recompute_kind", "selective (core)", "selective"), ("mem_kind", "max_memory_allocated", "allocated"),
    ],
)  # fmt: skip
def test_the_one_known_word_of_a_cell_is_what_it_says(tmp_path, column, cell, word):
    assert getattr(read_runs(_write(tmp_path, f"id,{column}\na-1,{cell}\n")).runs[0], column) == word
    for both in ("fp8 or bf16", "allocated/reserved", "full or none"):
        with pytest.raises(FivefoldError, match="use one of"):
            read_runs(_write(tmp_path, f"id,{column}\na-1,{both}\n"))


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path / "missing.csv", tmp_path, "a\0b"):
        with pytest.raises(FivefoldError, match="To go on"):
            read_runs(path)


def test_a_huge_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fivefold.measure.runs.MAX_FILE_BYTES", 100)
    with pytest.raises(FivefoldError, match="larger than"):
        read_runs(_write(tmp_path, "id\n" + "a-1\n" * 100))
    monkeypatch.undo()
    monkeypatch.setattr("fivefold.measure.runs.MAX_ROWS", 3)
    with pytest.raises(FivefoldError, match="more than 3 rows"):
        read_runs(_write(tmp_path, "id\n" + "".join(f"a-{n}\n" for n in range(4))))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("fuzz") / "runs.csv"
    path.write_bytes(b"id,tp,model,mem_kind\n" + raw)
    try:
        table = read_runs(path)
    except FivefoldError:
        return
    assert all(run.id for run in table.runs)


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Z")), min_size=1, max_size=20)


@given(
    st.lists(
        st.tuples(_TEXT, st.none() | st.integers(1, 4096), st.none() | _TEXT), max_size=8, unique_by=lambda r: r[0]
    )
)
def test_what_is_written_is_read_back(tmp_path_factory, rows):
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["id", "tp", "model"])
    writer.writerows([[name, "" if tp is None else tp, model or ""] for name, tp, model in rows])
    path = tmp_path_factory.mktemp("round") / "runs.csv"
    path.write_text(stream.getvalue(), encoding="utf-8")
    assert [(run.id, run.tp, run.model) for run in read_runs(path).runs] == rows


@pytest.mark.parametrize(
    ("row", "sp", "cp"),
    [("8,8,1", 1, 1), ("8,1,", 0, 8), ("8,,", 0, 8), ("8,1,4", 0, 4), ("1,8,1", 1, 1), ("0,8,1", 0, 1)],
)
def test_a_degree_of_sequence_parallelism_is_tensor_parallel_ranks_or_a_degree_of_its_own(tmp_path, row, sp, cp):
    path = tmp_path / "runs.csv"
    path.write_text(f"id,sp,tp,cp\na-1,{row}\n")
    run = read_runs(path).runs[0]
    assert (run.sp, run.cp) == (sp, cp)


@pytest.mark.parametrize(("cell", "stage"), [("FSDP", 3), ("FSDP2", 3), ("full_shard", 3), ("DDP", 0), ("ZeRO-2", 2)])
def test_stages_by_the_names_of_pytorchs_shards(tmp_path, cell, stage):
    path = tmp_path / "runs.csv"
    path.write_text(f"id,zero,gbs\na-1,{cell},8.4M\n")
    run = read_runs(path).runs[0]
    assert (run.zero, run.gbs) == (stage, round(8.4 * 2**20))
