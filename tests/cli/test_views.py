"""What is printed for people: it fits the width, its colour can be forced and forbidden, and it holds the numbers."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from fivefold.cli.render.validate import validate_view
from fivefold.measure import Errors, validate

SMALL = "--gpus 4 --seq 1024 --gbs 16"
COMMANDS = [
    f"plan gpt2-medium {SMALL} --tokens 1B --price 2 --ramp 8:16:100M",
    "plan deepseek-v2-lite --gpus 16 --seq 4096 --gbs 64 --pp 2 --top 2",
    "plan llama-3-70b --gpus 1 --gbs 1",
    "estimate llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512 --simple",
    "estimate gpt-1t --gpu a100-80g-sxm --gpus 3072 --tp 8 --pp 64 --vpp 2 --recompute full --gbs 3072",
    "estimate llama-3-8b --gpus 8 --tp 3 --gbs 8",
    "compare llama-3-70b --gpus 64 --a tp=4,pp=4,cp=2 --b tp=8,pp=4,recompute=full",
    "compare gpt2 --gpus 4 --seq 1024 --a tp=3 --b pp=2",
    "explain axes --gbs 512",
    "explain dp-limit --gpus 64",
    "explain rules",
    "explain assumptions mixtral-8x7b",
    "explain --help",
    "models",
    "gpus",
    "validate --source simumax --rows",
    "--help",
    "plan --help",
    "estimate --help",
    "compare --help",
    "explain dp-limit --help",
    "validate --help",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_100_columns(run, command: str) -> None:
    outcome = run(command)
    assert outcome.code in (0, 1)
    assert outcome.err == ""
    assert max(len(line) for line in outcome.out.splitlines()) <= 100
    assert "\x1b" not in outcome.out
    assert "None" not in outcome.out or command == "explain rules"  # a rule's source may quote Python


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminals_width_is_kept(run, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("plan gpt2 --gpus 4 --gbs 16", "gpus", "explain rules"):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(len(line) for line in run(command).out.splitlines()) <= min(width, 100)


def test_colour(run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in run("gpus --color always").out
    assert "\x1b[" not in run("gpus --color never").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run("gpus").out
    assert "\x1b[" not in run("gpus --color never").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\dm", run("gpus").out)
    assert "\x1b[" not in run("gpus --json --color always").out


def test_a_plan_says_what_it_found_and_why(run) -> None:
    command = f"plan gpt2-medium {SMALL}"
    document, text = run(f"{command} --json").document, " ".join(run(command).out.split())
    best = document["plans"][0]
    layout = best["layout"]
    assert f"TP{layout['tp']} CP{layout['cp']} PP{layout['pp']} DP{layout['dp']}" in text
    assert f"{document['searched']:,} layouts searched in" in text
    assert f"{document['fitting']:,} fit" in text
    assert f"{best['step']['tokens_per_s_per_gpu']:,.0f}" in text
    assert f"{best['memory']['reserved_bytes'] / 1e9:,.1f} of {best['memory']['capacity_bytes'] / 1e9:,.1f} GB" in text
    assert document["why"]["summary"] in text
    for neighbour in document["why"]["neighbours"]:
        assert neighbour["change"] in text
    for step in document["why"]["playbook"]["path"]:
        assert step["step"] in text
    for option in document["inputs"]["defaults"]:
        assert option in text


def test_a_plan_lists_no_gain_and_no_gap_of_nothing(run) -> None:
    """One replica of one micro-batch: its ZeRO stages are one, its batch is spent, and the path ends at the best."""
    text = " ".join(run("plan gpt2-medium --gpus 1 --gbs 1 --seq 1024").out.split())
    assert "as fast as the best." in text
    assert "data parallelism cannot grow" in text
    for nothing in (" 0.0 ms", "-0 ms", "can grow 1 times"):
        assert nothing not in text, nothing
    assert "takes the same time" in text
    assert "1,024 tokens per batch is under" in text


def test_what_is_not_sharded_has_no_replicas_of_shards(run) -> None:
    text = run("estimate gpt2-medium --gpus 8 --gbs 8 --zero 0").out
    assert "ZeRO-0 | " in text


def test_nothing_that_starts_is_not_called_too_large(run) -> None:
    text = " ".join(run("plan gpt2 --gpus 8 --gbs 8 --ep 2").out.split())
    assert "No layout would start." in text and "No layout fits." not in text


def test_numbers_stay_whole_on_a_narrow_terminal(run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"plan gpt2-medium {SMALL}"
    best = run(f"{command} --json").document["plans"][0]
    speed = f"{best['step']['tokens_per_s_per_gpu']:,.0f}"
    batches = f"{best['layout']['micro_batch']} x {best['layout']['num_micro_batches']}"
    for width, heads in ((100, ("step (80%)", "MFU", "tok/s/GPU")), (75, ("step", "tok/s/GPU")), (58, ("step",))):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = run(command).out.splitlines()
        at = next(at for at, line in enumerate(lines) if line.strip().startswith("TP "))
        head, first = lines[at], lines[at + 2]
        assert all(name in head for name in heads), width
        assert ("MFU" in head) == ("MFU" in heads)
        if "tok/s/GPU" in heads:
            assert (batches in first, speed in first) == (True, True), width
        else:
            assert f"{best['memory']['reserved_bytes'] / 1e9:,.1f}" in first


def test_a_narrow_table_folds_its_heads_and_no_number(run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "estimate llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512"
    stages = run(f"{command} --json").document["memory"]["stages"]
    monkeypatch.setenv("COLUMNS", "70")
    rows = [line.split() for line in run(command).out.splitlines()]
    for stage in stages:
        numbers = [f"{value / 1e9:,.1f}" for value in stage["breakdown"].values() if value]
        row = next(row for row in rows if row[:1] == [str(stage["stage"])])
        assert set(numbers) <= set(row)
        assert f"{stage['peak_bytes'] / 1e9:,.1f}" in row


@pytest.mark.parametrize("width", [70, 80])
def test_columns_move_together_before_their_heads_are_folded(run, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("estimate llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512").out.splitlines()
    head = next(line.split() for line in lines if line.startswith(" stage"))
    assert head == ["stage", "weights", "grads", "master", "optim", "activ", "logits", "buf", "reserve", "peak", "held"]


def test_rows_that_would_look_the_same_show_their_split(run) -> None:
    from rich.console import Console

    import fivefold as ff
    from fivefold.cli.render.plan import layouts_table

    work = ff.Workload(seq_len=1024, global_batch=16)
    cluster, model = ff.load_cluster("h100-sxm", gpus=4), ff.load_model("gpt2")
    found = ff.plan(model, cluster, work, pins={"pp": [4]})
    layouts = [ff.Layout(pp=4, first_stage_layers=first, last_stage_layers=6 - first) for first in (2, 4)]
    rows = [ff.estimate(model, cluster, work, layout) for layout in layouts]
    console = Console(width=100)
    with console.capture() as both:
        console.print(layouts_table(found, rows))
    assert "1f1b 2-3x2-4" in both.get()
    assert "1f1b 4-3x2-2" in both.get()
    with console.capture() as alone:
        console.print(layouts_table(found, rows[:1]))
    assert "2-3x2-4" not in alone.get()


def test_columns_move_together_before_a_word_is_folded() -> None:
    from rich.console import Console

    import fivefold as ff
    from fivefold.cli.render.plan import LayoutsTable

    model, cluster = ff.load_model("deepseek-v2-lite", layers=4), ff.load_cluster("h100-sxm", gpus=8)
    work = ff.Workload(seq_len=1024, global_batch=16)
    again = ff.Recompute(kind="selective", modules=("layernorm", "moe_act", "mla_up_proj"))
    row = ff.estimate(model, cluster, work, ff.Layout(tp=2, cp=2, ep=2, recompute=again))
    found = ff.plan(model, cluster, work, pins={"tp": [2], "pp": [1], "recompute": ["none"]}, top=1)
    whole = {}
    for width in range(80, 110):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(LayoutsTable(found, [row]))
        if "MFU" in captured.get():  # with all columns
            whole[width] = "norm+act+mla" in captured.get()
    narrowest = min(width for width in whole if whole[width])
    assert narrowest < 90
    assert all(whole[width] for width in range(narrowest, 110))


def test_a_ramp_says_how_many_levels_it_leaves_out(run) -> None:
    command = "estimate gpt2 --gpus 4 --seq 1024 --ramp 4:64:1B"
    levels = run(f"{command} --json").document["ramp"]["steps"]
    text = run(command).out
    assert re.search(rf"^ *\.\.\. {len(levels) - 8} more", text, re.MULTILINE)
    assert " more" not in run("estimate gpt2 --gpus 4 --seq 1024 --ramp 4:36:1B").out.split("Ramp-up")[1]


def test_what_the_need_adds_to_the_peak_is_named(run) -> None:
    text = run(f"estimate gpt2 {SMALL}").out + run(f"compare gpt2 {SMALL} --a tp=2 --b pp=2").out
    assert "of fragmentation, driver and communicators" in text
    assert "fragmentation, driver, communicators" in text
    assert "outside the allocator" not in text


def test_equal_stages_share_a_row(run) -> None:
    text = run("estimate gpt-1t --gpu a100-80g-sxm --gpus 512 --tp 8 --pp 64 --mbs 1 --gbs 1 --recompute full").out
    assert re.search(r"^ 1-62 ", text, re.MULTILINE)


def test_a_broken_rule_names_its_option_once(run) -> None:
    assert "--tp --tp" not in run("estimate gpt2 --gpus 9 --tp 9").out


def test_a_broken_rule_names_option_legal_values_and_source(run) -> None:
    document = run("estimate llama-3-8b --gpus 8 --tp 3 --gbs 8 --json").document
    text = " ".join(run("estimate llama-3-8b --gpus 8 --tp 3 --gbs 8").out.split())
    for rule in document["violations"]:
        assert rule["id"] in text
        assert " ".join(rule["message"].split()) in text
        assert rule["option"] in text


def _commands() -> list[str]:
    from fivefold.cli.commands.explain import TOPICS
    from fivefold.cli.main import COMMANDS

    return [*(row[0] for row in COMMANDS), *(f"explain {row[0]}" for row in TOPICS)]


@pytest.mark.parametrize("command", _commands())
def test_the_help_of_every_command_has_an_example(run, command: str) -> None:
    outcome = run(f"{command} --help")
    assert outcome.code == 0
    assert f"fivefold {command} " in outcome.out.partition("For example")[2]


def test_help_lists_every_flag_with_words(run) -> None:
    text = run("plan --help").out
    for flag in [
        "--tp",
        "--pp",
        "--zero",
        "--recompute",
        "--seq-len",
        "--seq",
        "--gbs",
        "--cluster",
        "--json",
        "--color",
        "--save",
        "--objective",
    ]:
        assert flag in text
    assert "fivefold plan llama-3-8b --gpus 8" in text


@pytest.mark.parametrize("width", [80, 100])
def test_an_error_and_its_sign_of_percent_stay_on_one_line(width: int) -> None:
    """Names as long as any framework's and GPU's beside errors of every length."""
    found = validate(sources=("simumax",))
    errors = Errors(n=100, median_ape=0.043, p90_ape=0.09, bias=-0.061)
    row = msgspec.structs.replace(
        found.by_source[0], source="vtrain-single", gpu="h100-96g-500w", runtime="deepspeed-zero", n=1440, time=errors,
        memory=errors, coverage80=1.0,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    console.print(validate_view(msgspec.structs.replace(found, by_source=(row,)), every_row=False))
    table = console.file.getvalue()  # type: ignore[attr-defined]
    assert table.count("-6.1%") == table.count("4.3%") == table.count("9.0%") == 2
    assert all(word in table for word in ("1440", "100%")) and (width < 100 or "deepspeed-zero" in table)


@pytest.mark.parametrize("width", [90, 100])
def test_the_heads_of_a_plans_columns_are_whole(run, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts the tables are at their widest: they stand closer before a column is left out."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("plan mixtral-8x7b --gpus 16 --gbs 128 --seq 4096").out.splitlines()
    tables = [line.split() for line in lines if " GB " in line and "sched." in line]
    assert len(tables) == 2
    assert all({"TP", "DP", "EP", "recompute", "GB", "tok/s/GPU"} <= set(names) for names in tables)
