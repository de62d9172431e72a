"""Whatever is typed, the answer is a document or a paragraph with a documented exit code, never a traceback."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BAD = [
    ("plan", "MODEL"),
    ("plan gpt2", "--gpus"),
    ("plan gpt2 --gpus 0", "--gpus"),
    ("plan gpt2 --gpus -8", "--gpus"),
    ("plan gpt2 --gpus 99999999999", "--gpus"),
    ("plan gpt2 --gpus eight", "--gpus"),
    ("plan gpt2 --gpus", "--gpus"),
    ("plan gpt2 --gpus 8 --gpu h1000", "--gpu"),
    ("plan gpt2 --gpus 8 --gpu h100-sxm --cluster x.toml", "--gpu"),
    ("plan gpt2 --cluster no-such-file.toml", "--cluster"),
    ("plan gpt2 --gpus 8 --tp two", "--tp"),
    ("plan gpt2 --gpus 8 --tp 2,,4", "--tp"),
    ("plan gpt2 --gpus 8 --tp 0", "--tp"),
    ("plan gpt2 --gpus 8 --tp 2.5", "--tp"),
    ("plan gpt2 --gpus 8 --no-tp --tp 2", "--no-tp"),
    ("plan gpt2 --gpus 8 --zero 4", "--zero"),
    ("plan gpt2 --gpus 8 --recompute some", "--recompute"),
    ("plan gpt2 --gpus 8 --recompute-modules attention", "--recompute-modules"),
    ("plan gpt2 --gpus 8 --recompute-layers 0", "--recompute-layers"),
    ("plan gpt2 --gpus 8 --schedule dualpipe", "--schedule"),
    ("plan gpt2 --gpus 8 --cp-kind ring", "--cp-kind"),
    ("plan gpt2 --gpus 8 --precision int8", "--precision"),
    ("plan gpt2 --gpus 8 --optimizer lion", "--optimizer"),
    ("plan gpt2 --gpus 8 --grad-dtype fp8", "--grad-dtype"),
    ("plan gpt2 --gpus 8 --seq 8K", "--seq-len"),
    ("plan gpt2 --gpus 8 --seq 0", "--seq-len"),
    ("plan gpt2 --gpus 8 --gbs -1", "--global-batch"),
    ("plan gpt2 --gpus 8 --gbs 8 --tokens-per-batch 4M", "--tokens-per-batch"),
    ("plan gpt2 --gpus 8 --tokens-per-batch lots", "--tokens-per-batch"),
    ("plan gpt2 --gpus 8 --ramp 1:2", "--ramp"),
    ("plan gpt2 --gpus 8 --ramp 16:8:1B", "--ramp"),
    ("plan gpt2 --gpus 8 --gbs 16 --ramp 8:32:1B", "--ramp"),
    ("plan gpt2 --gpus 8 --ramp 8:16:100", "--ramp"),
    ("plan gpt2 --gpus 8 --runtime megatron@", "--runtime"),
    ("explain rules --runtime megatron@", "--runtime"),
    ("plan gpt2 --gpus 8 --seq 10,24", "--seq-len"),
    ("plan gpt2 --gpus 8 --moe-imbalance nan", "--moe-imbalance"),
    ("plan gpt2 --gpus 8 --moe-imbalance -1", "--moe-imbalance"),
    ("plan gpt2 --gpus 8 --price 2", "--tokens"),
    ("plan gpt2 --gpus 8 --tokens 1B --price inf", "--price"),
    ("plan gpt2 --gpus 8 --objective fun", "--objective"),
    ("plan gpt2 --gpus 8 --objective cost", "--tokens"),
    ("plan gpt2 --gpus 8 --top 0", "--top"),
    ("plan gpt2 --gpus 8 --runtime megatron@9.9", "--runtime"),
    ("plan gpt2 --gpus 8 --runtime deepsped", "--runtime"),
    ("plan gpt2 --gpus 8 --gbs 7 --mbs 3", "--micro-batch"),
    ("plan gpt2 --gpus 8 --tp 2 --pp 2 --cp 4", "--tp"),
    ("plan gpt2 --gpus 8 --layers 13", "--layers"),
    ("plan plan.toml --gpus 8", "MODEL"),
    ("plan gpt2 --gpus 8 --tpp 2", "--tpp"),
    ("plan gpt2 gpt3 --gpus 8", None),
    ("plan gpt2 --gpus 8 --save /no/such/folder/plan.toml", "--save"),
    ("estimate gpt2 --gpus 8 --tp 2,4", "--tp"),
    ("estimate gpt2 --gpus 8 --pp 5000", "--pp"),
    ("estimate no-such.toml", "MODEL"),
    ("compare gpt2 --gpus 8", "--b"),
    ("compare gpt2 --gpus 8 --a tp --b pp=2", "--a"),
    ("compare gpt2 --gpus 8 --a tpp=2 --b pp=2", "--a"),
    ("compare gpt2 --gpus 8 --a tp=2,tp=4 --b pp=2", "--a"),
    ("compare gpt2 --gpus 8 --a tp=2 --b pp=2 --ramp 8:16:1B", "--ramp"),
    ("explain nothing", None),
    ("explain axes --dp 4", "--global-batch"),
    ("explain axes --gbs 0", "--global-batch"),
    ("explain dp-limit --gpus 1", "--gpus"),
    ("explain dp-limit --gpus 8 --mfu 40", "--mfu"),
    ("explain dp-limit --gpus 8 --mfu nan", "--mfu"),
    ("explain rules --runtime none", "--runtime"),
    ("validate --source nobody", "--source"),
    ("validate --runs no-such-file.csv", "--runs"),
    ("validate --data no-such-file.csv", "--runs"),
    ("models --color blue", "--color"),
    ("plan gpt2 --cluster h1000 --gpus 8", "--cluster"),
    ("plan gpt2 --cluster h1000 --tokens 1B --days 3", "--cluster"),
    ("calibrate runs.csv --cluster h1000", "--cluster"),
    ("plan gpt2 --gpus 8 --tp 2 --tp 4", "--tp"),
    ("calibrate no-such-file.csv", "RUNS"),
    ("train no-such-file.toml", "PLAN"),
    ("plan gpt2 --gpus 8 --tokens 1B --price two", "--price"),
]


@pytest.mark.parametrize(("command", "option"), BAD)
def test_bad_input_is_refused_with_the_users_own_option(run, command: str, option: str | None) -> None:
    outcome = run(*command.split(), "--json")
    assert outcome.code == 2, outcome
    assert outcome.err == ""
    error = outcome.document["error"]
    assert error["code"] != "internal"
    if option is not None:
        assert error["option"] == option
    assert len(error["message"]) > 20


@pytest.mark.parametrize(
    ("command", "legal"),
    [
        ("models --color blue", ["auto", "always", "never"]),
        ("plan gpt2 --gpus 8 --tokens 1B --price two", "a number"),
        ("plan gpt2 --gpus 8 --overlap-tp=perhaps", ["true", "false"]),
    ],
)
def test_the_parsers_own_mistakes_have_legal_values(run, command: str, legal: list[str] | str) -> None:
    outcome = run(f"{command} --json")
    assert (outcome.code, outcome.document["error"]["legal"]) == (2, legal)


def test_an_unknown_base_is_said_of_its_cluster_file(run, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "h1000"\ngpus = 8\n')
    error = run("plan", "gpt2", "--cluster", str(path), "--json").document["error"]
    assert (error["option"], error["value"], "mine.toml" in error["message"]) == ("base", "h1000", True)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan gpt2 --gpus 8 --tp 3", "--tp 3 does not divide the 8 GPUs. Legal for --tp here: 1, 2, 4, 8."),
        ("plan gpt2 --gpus 9 --tp 2,4", "--tp 2,4 does not divide the 9 GPUs. Legal for --tp here: 1, 3, 9."),
        ("plan gpt2 --gpus 8 --gbs 8 --mbs 3", "the global batch of 8 sequences. Legal for --micro-batch here: 1, 2,"),
        ("plan nobodys-model --gpus 8", "fivefold models lists the catalogue"),
        ("plan FILE --gpus 8", "is not JSON"),
        ("plan FILE --gpus 8", "Give a catalogue name, a config.json"),
        ("validate --runs FILE", "holds no runs"),
        ("export gpt2 --gpus 8 -o x --launcher slurm --time 25:99", "Legal: minutes, HH:MM:SS or D-HH:MM:SS"),
    ],
)
def test_a_refusal_says_what_is_legal_and_what_to_try(run, tmp_path, command: str, words: str) -> None:
    file = tmp_path / "header.csv"
    file.write_text("id,model\n")
    outcome = run(*command.replace("FILE", str(file)).split())
    assert outcome.code == 2, outcome
    assert words in outcome.err


@pytest.mark.parametrize("value", ["8.5", "8.0", "1e1", "0x8", "1_0", "8,5", "+8", "٨"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("plan gpt2", "--gpus"),
        ("plan gpt2 --gpus 8", "--gpus-per-node"),
        ("plan gpt2 --gpus 8", "--layers"),
        ("plan gpt2 --gpus 8", "--top"),
        ("explain axes", "--gbs"),
        ("explain axes --gbs 8", "--dp"),
        ("explain axes --gbs 8", "--mbs"),
        ("explain dp-limit --gpus 8", "--dp"),
        ("train plan.toml", "--steps"),
        ("train plan.toml", "--seed"),
        ("verify gpt2 --gpus 1", "--max-ranks"),
        ("verify gpt2 --gpus 1", "--seed"),
    ],
)
def test_a_count_is_never_rounded(run, command: str, option: str, value: str) -> None:
    outcome = run(*command.split(), option, value, "--json")
    error = outcome.document["error"]
    assert (outcome.code, error["code"], error["option"], error["value"]) == (2, "bad-number", option, value)
    assert error["legal"]


def test_thousands_may_be_set_apart(run) -> None:
    for gpus in ("1,024", "1_024"):
        document = run(f"explain dp-limit --gpus {gpus} --json").document
        assert document["inputs"]["cluster"]["gpus"] == 1024


ESCAPE = "\x1b]0;mine\x07"


def test_a_plan_file_cannot_steer_the_terminal(run, tmp_path) -> None:
    path = tmp_path / "plan.toml"
    assert run("estimate", "gpt2", "--gpus", "1", "--gbs", "8", "--save", str(path)).code == 0
    honest = path.read_text()
    for place in ('source = "', 'name = "gpt2', 'runtime = "megatron'):
        for text in ("\\u001b[2J", "\\u009b2J", "\\r"):
            assert place in honest
            path.write_text(honest.replace(place, place + text, 1))
            outcome = run("estimate", str(path))
            assert (outcome.code, "control character" in outcome.err) == (2, True), (place, text)
            assert outcome.err.isprintable() or outcome.err.rstrip("\n").isprintable()


def test_a_cluster_file_cannot_steer_the_terminal(run, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine\\u001b[2J"\nbase = "h100-sxm"\ngpus = 8\n')
    outcome = run("plan", "gpt2", "--cluster", str(path))
    assert (outcome.code, "control character" in outcome.err, "\x1b" in outcome.err) == (2, True, False)


def test_a_configuration_cannot_steer_the_terminal(run, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "\\u001b[2Jllama"}')
    outcome = run("plan", str(path), "--gpus", "8")
    assert (outcome.code, "\x1b" in outcome.err) == (2, False)


def test_nothing_printed_keeps_a_control_character(capsys) -> None:
    from rich.table import Table
    from rich.text import Text

    from fivefold.cli.flags import OutputFlags
    from fivefold.cli.output import console

    table = Table("head")
    table.add_row(Text(f"cell{ESCAPE}", style="red"))
    out = console(OutputFlags(color="always"))
    out.print(table)
    out.print(f"a line\x9b2J{ESCAPE}", soft_wrap=True)
    printed = capsys.readouterr().out
    assert "]0;mine" in printed  # the text is there, and what made it a command is not
    assert "\x1b]" not in printed
    assert not {"\x07", "\x9b"} & set(printed)
    assert "\x1b[31m" in printed  # its own colours stay


@pytest.mark.parametrize(
    "command",
    ["plan gpt2 --gpus 8 --tpp 2", "plan gpt2 --GPUS 8", "pln gpt2", "plan lama-3-8b --gpus 8", "models --jsn"],
)
def test_a_slip_of_the_finger_is_answered_with_what_was_meant(run, command: str) -> None:
    outcome = run(command)
    assert outcome.code == 2
    assert "id you mean" in outcome.err


def test_a_hostile_configuration_is_refused(run, tmp_path) -> None:
    for text in ("{", "[]", '{"model_type": "llama"}', '{"model_type": "llama", "hidden_size": 1e400}', "\x00"):
        path = tmp_path / "config.json"
        path.write_text(text)
        outcome = run("plan", str(path), "--gpus", "8", "--json")
        assert (outcome.code, outcome.document["error"]["code"] != "internal") == (2, True), text


def test_a_bug_is_one_sentence_and_another_exit_code(run, monkeypatch: pytest.MonkeyPatch) -> None:
    import fivefold.model

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(fivefold.model, "models", broken)
    outcome = run("models")
    assert (outcome.code, outcome.out) == (70, "")
    assert "ZeroDivisionError" in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.count("\n") == 1
    assert run("models --json").document["error"]["code"] == "internal"


def test_ctrl_c(run, monkeypatch: pytest.MonkeyPatch) -> None:
    import fivefold.model

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fivefold.model, "models", interrupted)
    outcome = run("models")
    assert (outcome.code, outcome.err) == (130, "interrupted\n")


NUMBERS = ("0", "1", "2", "3", "4", "8", "16", "1,2", "-1", "1e3", "x", "", "999999999999", "2147483648")
WORDS = (
    "none",
    "full",
    "selective",
    "p2p",
    "a2a",
    "1f1b",
    "afab",
    "interleaved",
    "all",
    "layernorm",
    "mlp,moe",
    "#",
    "é",
)
VALUED = [
    "tp",
    "cp",
    "pp",
    "vpp",
    "ep",
    "etp",
    "zero",
    "mbs",
    "dp-replicate",
    "recompute",
    "recompute-layers",
    "recompute-modules",
    "cp-kind",
    "schedule",
    "first-stage-layers",
    "last-stage-layers",
    "precision",
    "optimizer",
    "grad-dtype",
    "seq",
    "gbs",
    "tokens-per-batch",
    "tokens",
    "ramp",
    "runtime",
    "layers",
    "gpus",
    "gpus-per-node",
    "moe-imbalance",
]
SWITCHES = [
    "no-tp",
    "no-cp",
    "no-pp",
    "no-ep",
    "sequence-parallel",
    "no-sequence-parallel",
    "overlap-tp",
    "no-overlap-grad",
    "mtp",
]
FLAGS = st.one_of(
    st.tuples(
        st.sampled_from(VALUED), st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.text(max_size=8))
    ),
    st.tuples(st.sampled_from(SWITCHES), st.none()),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=st.sampled_from(["gpt2", "deepseek-v2-lite", "no-such-model"]),
    flags=st.lists(FLAGS, max_size=5, unique_by=lambda flag: flag[0]),
)
def test_any_options_give_one_document_and_a_documented_code(run, model: str, flags: list) -> None:
    words = ["estimate", model, "--gpus=8", "--gbs=16", "--json"]
    for name, value in flags:
        words = [word for word in words if not word.startswith(f"--{name}=")]
        words.append(f"--{name}" if value is None else f"--{name}={value}")
    outcome = run(*words)
    assert outcome.code in (0, 1, 2), outcome
    assert outcome.document["kind"] == ("error" if outcome.code == 2 else "estimate")
    assert outcome.err == ""


LONG = "n" * 300


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (f"plan {LONG}.json --gpus 8", "MODEL"),
        (f"plan {LONG}/config.json --gpus 8", "MODEL"),
        (f"estimate {LONG}.toml", "MODEL"),
        (f"estimate gpt2 --gpus 8 --save {LONG}.toml", "--save"),
        (f"plan gpt2 --gpus 8 --cluster {LONG}.toml", "--cluster"),
        (f"check {LONG}", "FILE"),
        (f"validate --runs {LONG}.csv", "--runs"),
        (f"export gpt2 --gpus 8 -o {LONG}", "--out"),
        (f"sweep gpt2 --gpus 8 -o {LONG}", "--out"),
        (f"sweep {LONG} --collect", "MODEL"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_bad_input(run, command: str, option: str) -> None:
    """A name longer than names may be, as a folder that may not be entered, makes the looking itself fail."""
    outcome = run(f"{command} --json")
    assert (outcome.code, outcome.document["error"]["option"]) == (2, option)
    assert "too long" in outcome.document["error"]["message"]
