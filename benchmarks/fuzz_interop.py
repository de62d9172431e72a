"""Broken, hostile and random files through the reader: an answer or an error with a place, never a crash or a hang.

Run: python benchmarks/fuzz_interop.py [FILES] [SEED]. Files are made by changing the test scripts, by random shell and
YAML grammar, and of random bytes; a file whose reading takes over a second of the processor, or that fails otherwise
than with FivefoldError, is reported and makes the exit code 1. tests/interop/test_hostile.py runs some hundred of them.
"""

from __future__ import annotations

import random
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time

from fivefold.advise.check import check
from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.interop.megatron.read import Asked, read_source
from fivefold.interop.source import decoded

SCRIPTS = Path(__file__).parent.parent / "tests" / "interop" / "scripts"
SLOW_S = 1.0
# What scripts leave out, so that as many as possible are followed to the end.
ASKED = Asked(gpus=16, gpu="h100-sxm", extra="--vocab-size 32000")

_PIECES = (
    "$", "${", "}", "$(", ")", "$((", "))", "`", "'", '"', "\\", "\n", "\\\n", ";", "&", "|", "&&", "||", "<<EOF\n",
    "EOF\n", "<(", ">", "[[", "]]", "((", "(", "{", " }", "#", "!", "=", "+=", "a=(", "${a[@]}", "${a:-", "${#a}",
    "${!a}", "$@", "$1", "if ", "then ", "fi\n", "else ", "elif ", "case ", " in ", "esac\n", ";;", "for x in ",
    "do ", "done\n", "while ", "f() {", "eval ", "source ", ". ", "exit 1\n", "torchrun ", "pretrain_gpt.py ",
    "--num-layers ", "4 ", "--hidden-size=", "--tensor-model-parallel-size ", "99999999999999999999 ", "-1 ", "0 ",
    "model.num_layers=", "*", "?", "[a-z]", "~", "\t", "\x00", "\x01", "\x1b[31m", "\ufeff", "é", "\r\n",
    "..//..//etc/passwd ", "/dev/zero ", "a" * 200, "{1..9}",
)  # fmt: skip
_YAML_PIECES = (
    "a: ", "- ", "\n", "  ", "&x ", "*x", "!!python/object/apply:os.system ", "!!binary ", "[", "]", "{", "}", ",",
    ": ", "? ", "|\n", ">\n", "'", '"', "model:\n  num_layers: 4\n", "<<: *x\n", "train:\n",
    "  tensor_model_parallel_size: 2\n", "---\n", "null", "1e999", "0x1f", "0o7", "1_000", "2001-01-01", "\x00", "#",
    "%YAML 1.1\n", "@", "`",
)  # fmt: skip


def changed(source: random.Random, texts: list[str]) -> bytes:
    """A test script with some pieces cut out, repeated, replaced by numbers or put in."""
    text = source.choice(texts)
    for _ in range(source.randrange(1, 5)):
        at, to = sorted(source.randrange(len(text) + 1) for _ in range(2))
        cut = text[at : min(to, at + source.choice((4, 40, 200)))]
        text = source.choice(
            (
                text[:at] + text[at + len(cut) :],
                text[:at] + cut * source.randrange(2, 5) + text[at + len(cut) :],
                text[:at] + source.choice(_PIECES) + text[at:],
                text[:at] + str(source.choice((0, 1, 3, 7, 64, 10**9))) + text[at + 1 :],
            )
        )
    return text.encode(errors="surrogatepass")


def grown(source: random.Random, pieces: tuple[str, ...]) -> bytes:
    """Random pieces of the language, now and then one of them a thousand times."""
    text = "".join(source.choice(pieces) for _ in range(source.randrange(1, 120)))
    if source.random() < 0.1:
        text += source.choice(pieces) * source.randrange(100, 20_000)
    return text.encode(errors="surrogatepass")


def noise(source: random.Random) -> bytes:
    return source.randbytes(source.randrange(0, 3000))


def doubled(source: random.Random) -> bytes:
    """Values, functions and loops that would grow without end."""
    steps = source.randrange(2, 60)
    kinds = (
        "a=xxxxxxxxxxxxxxxx\n" + 'a="$a$a"\n' * steps + "torchrun pretrain_gpt.py --num-layers $a\n",
        "a=(1 2 3 4)\n" + 'a=("${a[@]}" "${a[@]}")\n' * steps + "torchrun x.py --num-layers ${a[@]}\n",
        "f() { f; f; }\nf\n",
        "for a in 1 2 3 4 5 6 7 8; do\n" * min(steps, 30) + "x=$x.\n" + "done\n" * min(steps, 30),
        "if $x; then a=1; fi\n" * steps * 20,
        "${a:-" * steps + "x" + "}" * steps,
        "$(" * steps + "x" + ")" * steps,
        "eval 'eval \"eval x\"'\n" * steps,
        "x='eval $x'\neval $x\n",
        "case $x in " + "*a*a*a*a*a*a*a*b) y=1;; " * steps + "esac\n",
        "x=" + "a" * 900 + "\necho ${x%%*a*a*a*b} ${x##*b*a*a*a}\n" * steps,
    )
    return source.choice(kinds).encode()


def aliases(source: random.Random) -> bytes:
    """YAML that explodes, contains itself, or is deep."""
    steps = source.randrange(2, 40)
    bombs = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, steps))
    return source.choice(
        (
            bombs,
            "a: &a\n  b: *a\n",
            "[" * steps * 40,
            "a: {" * steps * 10,
            "- " * steps * 50,
            "a: !!python/name:os.system\n",
        )
    ).encode()


def files(count: int, seed: int) -> list[tuple[str, bytes]]:
    """(name, content) of `count` files."""
    source = random.Random(seed)
    shell = [path.read_text() for path in sorted(SCRIPTS.glob("*.sh"))]
    yaml = [path.read_text() for path in sorted(SCRIPTS.glob("*.yaml"))] or ["model:\n  num_layers: 4\n"]
    makers: tuple[tuple[str, Callable[[], bytes]], ...] = (
        ("x.sh", lambda: changed(source, shell)),
        ("x.sh", lambda: changed(source, shell)),
        ("x.sh", lambda: grown(source, _PIECES)),
        ("x.sh", lambda: doubled(source)),
        ("x.sh", lambda: noise(source)),
        ("x.yaml", lambda: changed(source, yaml)),
        ("x.yaml", lambda: grown(source, _YAML_PIECES)),
        ("x.yaml", lambda: aliases(source)),
    )
    out = []
    for at in range(count):
        name, make = makers[at % len(makers)]
        out.append((name, make()))
    return out


def outcome(name: str, content: bytes, *, priced: bool = True) -> str:
    """ "read", "refused", or what went wrong. priced: what was read is checked too, which takes its time."""
    start, seconds = process_time(), 0.0
    try:
        reading = read_source(decoded(content, name), name, None, ASKED)
        seconds = process_time() - start
        if priced:
            check(reading, load_cluster("h100-sxm", reading.gpus, reading.gpus_per_node), top=1)
        found = "read"
    except FivefoldError:
        found = "refused" if seconds == 0.0 else "read"
    except BaseException as error:
        found = f"CRASH {type(error).__name__}: {str(error)[:100]}"
    seconds = seconds or process_time() - start
    return found if seconds < SLOW_S else f"SLOW {seconds:.1f} s, {found}"


def main(count: int, seed: int) -> int:
    """Print the counts and the first bad files."""
    counts: Counter[str] = Counter()
    worst = 0.0
    for name, content in files(count, seed):
        start = process_time()
        found = outcome(name, content)
        worst = max(worst, process_time() - start)
        counts[found.split(":")[0]] += 1
        if found not in ("read", "refused") and sum(counts.values()) < 10**6:
            print(found, content[:300])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count:,} files, seed {seed}: {dict(counts)}")
    print(f"slowest {worst:.2f} s with its check; peak memory {peak:.0f} MiB")
    return int(set(counts) - {"read", "refused"} != set())


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in (sys.argv[1:3] + ["10000", "1"][len(sys.argv) - 1 :]))))
