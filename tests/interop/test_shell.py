"""The reader of shell scripts beside a real bash: the same words reach a command, from snippets that only print."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fivefold.errors import FivefoldError
from fivefold.interop.shell.files import Files
from fivefold.interop.shell.parser import parse
from fivefold.interop.shell.run import Runner
from fivefold.interop.shell.state import State, is_unknown, without_unknowns
from fivefold.interop.source import Field, plain

BASH = shutil.which("bash")

# Every snippet calls `show`, which prints its words one by one; nothing else has an effect.
SNIPPETS = {
    "words": "show a 'b c' \"d e\" f\\ g ''",
    "continued": "show a \\\n  b \\\n  c # not d",
    "comment in a word": "show a#b '#c' # d",
    "scalar": 'x=5; y=$x; z="$y"6; show $x $y $z',
    "splitting": "x='a  b   c'; show $x \"$x\"",
    "joined": "x='a b'; show p${x}q \"p${x}q\"",
    "tabs and lines": "x=$'a\\tb'; y='a\n  b'; show $y",
    "array": "a=(1 '2 3' $((2*2))); show ${a[@]} \"${a[@]}\" ${#a[@]} ${a[1]} $a",
    "array in lines": "a=(\n  --x 1   # one\n\n  # none\n  --y '2 3'\n)\nshow \"${a[@]}\"",
    "array added to": 'a=(1); a+=(2 3); b=("${a[@]}" 4); show "${b[@]}" ${#b[@]}',
    "text added to": 'x=a; x+=b; x="$x c"; show $x',
    "defaults": 'unset q; x=1; show ${q:-4} ${x:-4} ${q-5} ${x:+6} "${q:-a b}" ${q:-$x}',
    "assigned default": ": ${q:=7}; show $q",
    "empty default": "q=; show ${q:-4} [${q-5}]",
    "edited": "f=/a/b/model.tar.gz; show ${f##*/} ${f%.gz} ${f%%.*} ${f#/} ${f/model/net} ${#f}",
    "cases of letters": "x=Ab; show ${x^^} ${x,,} ${x^} ${x,}",
    "slices": "x=abcdef; a=(1 2 3 4); show ${x:1:3} ${x:2} ${a[@]:1:2}",
    "indirect": "x=y; y=z; show ${!x}",
    "arithmetic": "n=8; g=4; show $((n*g)) $((n / 3 + 1)) $(( (n+g) % 5 )) $((2**10)) $((-7/2)) $((n>g))",
    "arithmetic with dollars": "n=8; show $(($n*2)) $((${n}+1))",
    "if": 'x=fp8; if [[ "$x" == "fp8" ]]; then show a; elif true; then show b; else show c; fi',
    "numbers compared": "t=4; if [ $t -gt 1 ]; then s=--sp; fi; show $s; [ $t -le 3 ] || show more",
    "empty tests": 'x=; [ -z "$x" ] && show empty; [[ -n $x ]] && show full; [[ -z $x && 1 -eq 1 ]] && show both',
    "negation": "! false && show a; if ! [ a = b ]; then show c; fi; [[ a != b ]] && show d",
    "patterns": 'x=llama-7b; [[ $x == llama* ]] && show a; [[ $x == "llama*" ]] || show b; [[ $x =~ 7b ]] && show c',
    "case": "for s in 7b 13B x; do case $s in 7b|8b) show small ;; 1?[bB]) show big;; *) show other ;; esac; done",
    "case with parentheses": "case a in (a) show 1 ;; esac",
    "for": 'for i in 1 2 3; do x="$x-$i"; done; show $x',
    "function": 'f() { local a=$1; shift; show "$a" $# "$@"; }; f 1 \'2 3\' 4',
    "function with return": "f() { show a; return 0; show b; }; f; show c",
    "function in words": "function g { show $2; }\ng 1 2",
    "nested functions": 'outer() { inner "$@" z; }; inner() { show "$@"; }; outer x y',
    "group": "{ x=1; show $x; }; ( x=2; show $x ); show $x",
    "and or": "true && show a || show b; false || show c && show d",
    "eval": "c='show a b'; eval $c; eval \"x=4\"; show $x",
    "here-document": "x=4\nread -r -d '' t <<EOF || true\n  --a $x \\\n  --b\nEOF\nshow $t",
    "here-document as written": "read -r -d '' t <<'EOF' || true\n--a $x\nEOF\nshow \"$t\"",
    "set": "set -- a 'b c'; show \"$@\" $1 $#",
    "shift": 'set -- a b c; shift; show $1; shift 1; show "$@"',
    "substitutions": "show $(echo a b) \"$(echo 'c d')\" `echo e` $(basename /x/y.sh) $(dirname /x/y) $(expr 3 \\* 4)",
    "exports": "export A=1 B='2 3'; declare C=4; readonly D=5; show $A \"$B\" $C $D",
    "environment before a command": "A=1 show $A; show [$A]",
    "text over lines": 'x=" \\\n  --a 1 \\\n  --b "; show $x',
    "single quotes over lines": "x='--a 1\n --b 2'; show $x",
    "exit": "show a; ( exit 0; show b ); show c; exit 0; show d",
    "while": "while false; do show a; done; show b",
    "until": "set -- a b; until [ $# -eq 0 ]; do show $1; shift; done; show $#",
    "loop over arguments": "set -- --tp 4 --x; while [[ $# -gt 0 ]]; do case $1 in --tp) t=$2; shift 2;; "
    "*) show $1; shift;; esac; done; show $t",
    "loop with break": "set -- -t 4 -- rest; while true; do case $1 in -t) t=$2; shift 2;; --) shift; break;; esac; "
    'done; show $t "$@"',
    "getopts": "set -- -t 4 -dp2 -n -- z; while getopts ':t:p:n:d' o; do case $o in t) show t $OPTARG;; "
    'p) show p $OPTARG;; d) show d;; n) show n $OPTARG;; *) show bad;; esac; done; shift $((OPTIND-1)); show "$@"',
    "getopts with a stranger": "set -- -z -t; while getopts ':t:' o; do show $o $OPTARG; done; show $OPTIND",
    "continue and break": "for i in 1 2 3 4; do if [ $i = 2 ]; then continue; fi; if [ $i = 4 ]; then break; fi; "
    "show $i; done",
    "output of a function": "f() { local n=$1; case $n in 7b) echo --a 1; echo b >&2; echo --c; ;; esac; x=2; }; "
    'x=1; show $(f 7b) "$(f 7b)" [$(f 8b)] $x',
    "output of functions in functions": "g() { echo -n $1; echo $2; }; f() { echo a $(g b c) 2>/dev/null; }; show $(f)",
    "a here-document as output": "f() { cat <<EOF\n--a $1\nEOF\n}; show $(f 4)",
    "ifs in strings": 'x="a\tb"; show $x',
    "escapes in quotes": 'show "a\\"b" "\\$x" \'a\\b\' "a\\b" a\\\\b',
    "dollar alone": "show $ a$ \"$\" '$x'",
    "plus and equals": "x=a=b; show $x --k=v --k='v w'",
}


def ours(text: str, file: str = "x.sh") -> list[list[str]]:
    """The words of every `show` in a script."""
    state = State(file)

    def wanted(fields: list[Field]) -> bool:
        return bool(fields) and fields[0].text == "show"

    runner = Runner(state, Files(None), wanted)
    runner.whole(parse(text, file))
    # What is set nowhere is empty in bash, and known to be unknown here.
    return [
        [
            without_unknowns(str(plain(each.text))).replace("…", "")
            for each in command.fields[1:]
            if not is_unknown(each.text)
        ]
        for command in runner.commands
    ]


def theirs(text: str) -> list[list[str]]:
    script = "show() { for w in \"$@\"; do printf '%s\\x1f' \"$w\"; done; printf '\\x1e'; }\n" + text
    # An empty environment, as the reader has none.
    done = subprocess.run([str(BASH), "--norc", "-c", script], capture_output=True, text=True, env={}, timeout=20)
    return [call.split("\x1f")[:-1] for call in done.stdout.split("\x1e")[:-1]]


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("name", SNIPPETS)
def test_the_same_words_as_bash(name: str) -> None:
    expected = theirs(SNIPPETS[name])
    assert expected, "the snippet shows nothing"
    assert ours(SNIPPETS[name]) == expected


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_bash_agrees_on_the_test_scripts_being_shell(scripts) -> None:
    for path in scripts.glob("*.sh"):
        assert subprocess.run([str(BASH), "-n", str(path)], capture_output=True, timeout=20).returncode == 0, path


def test_what_no_text_decides_goes_both_ways() -> None:
    text = 'x=1\nif [ -f file ]; then x=2; y=3; fi\na=(p)\nif grep -q z f; then a+=(q r); fi\nshow $x "${a[@]}"\n'
    state = State("x.sh")
    runner = Runner(state, Files(None), lambda fields: bool(fields) and fields[0].text == "show")
    runner.whole(parse(text, "x.sh"))
    (command,) = runner.commands
    texts = [each.text for each in command.fields[1:]]
    assert texts[1] == "p"
    unknown = [state.unknown_in(each) for each in (texts[0], texts[2])]
    assert [(each.why, each.name, set(each.choices), each.place.line) for each in unknown if each] == [
        ("branch", "x", {"2", "1"}, 2),
        ("branch", "a", {"q r", ""}, 4),
    ]


def test_words_that_a_branch_adds_to_a_text_are_kept_apart() -> None:
    text = 'A="--a 1"\nif [ -f x ]; then A="$A --b 2"; fi\nif [ -f y ]; then A+=" --c"; fi\nshow $A\n'
    assert ours(text) == [["--a", "1"]]  # what a condition may add is unknown


def test_a_branch_that_ends_the_script_is_not_taken() -> None:
    assert ours("if [ ! -d data ]; then exit 1; fi; show a") == [["a"]]
    assert ours('if [ -z "$NODES" ]; then echo usage; exit 1; fi; show a') == [["a"]]
    assert ours("[ $# -lt 2 ] && exit 1; show a") == [["a"]]
    assert ours("cd /somewhere || exit 1; show a") == [["a"]]
    assert ours("exit 1; show a") == []
    assert ours("if [ -f x ]; then a=1; exit 1; else a=2; fi; show $a") == [["2"]]
    assert ours('case "$1" in 7b) a=1 ;; *) a=9; exit 1 ;; esac; show $a') == [["1"]]


def test_lines_of_values() -> None:
    state = State("x.sh")
    runner = Runner(state, Files(None), lambda fields: bool(fields) and fields[0].text == "show")
    text = 'TP=4\nARGS="--a 1 \\\n --b $TP \\\n --c"\nLIST=(\n--d\n9\n)\n'
    text += 'show \\\n $ARGS ${LIST[@]}\nbash -c "show $ARGS"\n'
    runner.whole(parse(text, "x.sh"))
    first, second = (
        [(str(plain(f.text)), f.place.line) for f in c.fields if f.text != "show"] for c in runner.commands
    )
    assert first == [("--a", 2), ("1", 2), ("--b", 3), ("4", 1), ("--c", 4), ("--d", 6), ("9", 7)]
    assert second == [("--a", 2), ("1", 2), ("--b", 3), ("4", 1), ("--c", 4)]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a=1\necho 'never closed\n\n", 2, "single quote"),
        ('a=1\n\nb="never closed', 3, "double quote"),
        ("x=$(echo a\n", 1, "parenthesis"),
        ("if true; then\n  a=1\n", 1, "fi"),
        ("a=(1 2\n", 1, "array"),
        ("echo ${x\n", 1, "braces"),
        ("fi\n", 1, "closes nothing"),
        ("cat <<EOF\nno end\n", 1, "here-document"),
        ("case x in a) b", 1, "esac"),
        ("a=1 )\n", 1, "not expected"),
    ],
)
def test_broken_shell_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(FivefoldError) as caught:
        ours(text)
    assert words in caught.value.message
    assert f"x.sh:{line}" in caught.value.message or "esac" in words


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; f; }\nf\n",
        "x='eval $x'\neval $x\n",
        "a=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n" + 'a="$a$a"\n' * 40,
        "a=(1 2 3 4)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 40,
        "for a in 1 2 3 4 5 6 7 8; do\n" * 12 + "x=1\n" + "done\n" * 12,
        "${a:-" * 100 + "x" + "}" * 100,
        "echo " + "$(" * 100 + ")" * 100,
        "{ " * 200 + "true; " + "}; " * 200,
    ],
)
def test_what_would_never_end_is_refused(text: str) -> None:
    with pytest.raises((FivefoldError, RecursionError)):
        ours(text)


@pytest.mark.parametrize(
    "body", ["date", "echo a | sed s/a/b/", "grep a b", "if [ -f x ]; then echo a; fi", "printf %d 4"]
)
def test_what_a_function_prints_by_a_program_is_not_known(body: str) -> None:
    state = State("x.sh")
    runner = Runner(state, Files(None), lambda fields: fields[0].text == "show")
    runner.whole(parse(f"f() {{ {body}; }}; show $(f)", "x.sh"))
    words = [word.text for command in runner.commands for word in command.fields[1:]]
    assert words, "the unknown has to stay visible"
    assert all(is_unknown(word.rstrip("\n")) for word in words)
