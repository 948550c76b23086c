"""Mutated policy and run files: each must be read, or refused by a ConfigError, within five seconds.

    python scripts/fuzz_files.py --count 100000 --minutes 9 --out docs/results/fuzz_files.json

File number i is the same in every run. With --out, a run that stopped early goes on where it ended. What is accepted
is also written, read back and compared, and resolved against the sites of a made-up model.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sage_patch.config import ConfigError, load_policy, load_run_config, policy_to_yaml
from sage_patch.policy import AttentionSite, Policy, PolicyError, resolve
from sage_patch.yamltext import read_yaml

ROOT = Path(__file__).resolve().parents[1]
SEED = 12
LIMIT_S = 5.0
FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "docs" / "calibrated").glob("*.yaml")])
SITES = [
    AttentionSite(f"blocks.{i}.{part}", "blocks", i, 4, role, 8, 2, 64)
    for i in range(4)
    for part, role in (("attn1", "self"), ("attn2", "cross"))
]

KEYS = """version recipe rules match layers role steps reason score on_unsupported quantize_fp32 min_q_len min_kv_len
calibration model path package gguf sha256 dtype device meta task kind prompts text windows window_tokens seeds
arguments policy compare targets max_kl min_psnr evaluate lpips needle_lengths seed output first last from to <<
blocks skip name
a.b {0} %s 0 ~ true é""".split()
VALUES = [
    "", "~", "null", "true", "on", "0", "1", "-1", "1.5", "1e-3", "1e999", ".inf", "-.inf", ".nan", "010", "0x1f",
    "1:30", "9" * 19, "9" * 40, "9" * 5000, "2020-99-99", "exact", "sage2", "exat", "qk_int4_pv_fp8:smooth=none",
    "qk_int4_pv_fp8:smoth=none", "wan", "configs", "{}", "[]", "[[]]", "{first: 2}", "{last: 0.1}", "{first: .nan}",
    "{first: 1.0}", "{from: 4, to: -1}", "{from: 9, to: 1}", '"0-3"', "3-1", "[0, 1, -1]", "[0.5]", "first 2", "25%",
    "{a: 1}", "{0}", "'{0}'", "'{input}'", "'%s %d'", "'[a-'", "'*'", "'**'", "*x", "&x [1]", "&a [*a]", "!!int abc",
    "!!float ''", "!!bool maybe", "!!timestamp abc", "!!python/name:os.system {}", "!!binary x", "!!set {a}",
    "!!omap [a]", "! x", "!foo bar", '"\\0"', '"\\x07"', '"\\ud800"', '"\\UFFFFFFFF"', '"\\q"', "a\x07b", "\x00",
    "\ufeff", "\x85", "\u2028", "é日本", "| \n  x", "> \n  x", "'", '"', "[", "{", "]", "}", "? x", "- x", "- - - x",
    "@x", "`x`", "%x", "# x", "a: b", "a: b: c", "AB" * 32, "ab" * 32, "cuda:99", "cuda0", "/", ".", "..",
    "~nobody/x", "/dev/null", "a/b/c", "x" * 300, "x" * 30_000, "*" * 3000,
]  # fmt: skip
INDENTS = ["", " ", "  ", "    ", "\t", "- "]


def bombs(rng: random.Random) -> str:
    """Texts that grow when they are read."""
    n, wide = rng.randint(1, 40), rng.randint(1, 12)
    return rng.choice(
        [
            "z: " + "[" * (n * 30) + "]" * (n * 30),
            "z: " + "{a: " * (n * 30) + "}" * (n * 30),
            "- " * (n * 30),
            "? " * (n * 30),
            "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * wide)}]\n" for i in range(1, n)),
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * wide)}]}}\n" for i in range(1, n)),
            f"? {'k' * (n * 1000)}\n: 1",
            "rules: [" + "{recipe: x}, " * (n * 50) + "]",
            "rules:\n" + "  - {match: '*', recipe: exact}\n" * (n * 20),
        ]
    )


def lines(rng: random.Random, text: str) -> str:
    """Lines left out, doubled, moved, indented."""
    rows = text.split("\n")
    i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
    kind = rng.randrange(6)
    if kind == 0:
        del rows[i]
    elif kind == 1:
        rows.insert(j, rows[i])
    elif kind == 2:
        rows[i], rows[j] = rows[j], rows[i]
    elif kind == 3:
        rows[i] = rng.choice(INDENTS) + rows[i].lstrip()
    elif kind == 4:
        rows = rows[:i]
    else:
        rows.insert(i, rng.choice(INDENTS) + f"{rng.choice(KEYS)}: {rng.choice(VALUES)}")
    return "\n".join(rows)


def values(rng: random.Random, text: str) -> str:
    """One value, or one key, is another."""
    rows = text.split("\n")
    places = [i for i, row in enumerate(rows) if ":" in row and not row.lstrip().startswith("#")]
    if not places:
        return text
    i = rng.choice(places)
    key, _, value = rows[i].partition(":")
    if rng.random() < 0.3:
        key = key[: len(key) - len(key.lstrip())] + rng.choice(KEYS)
    else:
        value = " " + rng.choice(VALUES)
    rows[i] = f"{key}:{value}"
    return "\n".join(rows)


def characters(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 8)):
        at, n = rng.randrange(len(text) + 1), rng.choice([0, 0, 1, 1, 5])
        new = rng.choice(
            ["", chr(rng.randrange(128)), rng.choice("[]{}:,-?&*!|>'\"%@`#\n\t "), chr(rng.randrange(0xD7FF))]
        )
        text = text[:at] + new + text[at + n :]
    return text


def bombed(rng: random.Random, text: str) -> str:
    return text.rstrip() + "\n" + bombs(rng) + "\n"


def spliced(rng: random.Random, text: str) -> str:
    """The head of one file and the tail of another."""
    other = rng.choice(FILES).read_text()
    return text[: rng.randrange(len(text) + 1)] + other[rng.randrange(len(other) + 1) :]


MUTATIONS: list[Callable[[random.Random, str], str]] = [lines, values, values, characters, bombed, spliced]


def encoded(rng: random.Random, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.01:
        return text.encode("utf-16", "surrogatepass")
    if kind < 0.03:
        at = rng.randrange(len(data) + 1)
        return data[:at] + bytes([rng.randrange(256)]) + data[at:]
    return b"\xef\xbb\xbf" + data if kind < 0.04 else data


def mutated(number: int) -> tuple[str, bytes, list[str], bool]:
    """(what was done, the file's bytes, overrides, whether it is read as a run file)."""
    rng = random.Random(SEED * 1_000_003 + number)
    path = rng.choice(FILES)
    text, done = path.read_text(), []
    is_run = "\ntask:" in text
    for _ in range(rng.choice([1, 1, 2, 4])):
        change = rng.choice(MUTATIONS)
        text = change(rng, text)
        done.append(change.__name__)
    overrides = []
    if is_run and rng.random() < 0.2:
        where = ".".join(rng.choice(KEYS) for _ in range(rng.randint(1, 3)))
        overrides = [rng.choice([f"{where}={rng.choice(VALUES)}", where, rng.choice(VALUES)])]
        done.append("overrides")
    return "+".join(sorted(set(done))), encoded(rng, text), overrides, is_run != (rng.random() < 0.03)


class Hang(BaseException):
    pass


def alarm(*_: Any) -> None:
    raise Hang


def outcome(path: Path, overrides: list[str], as_run: bool) -> str:
    """ "accepted" or "refused"; whatever else happens is raised."""
    try:
        policy = load_run_config(path, overrides).policy.build() if as_run else load_policy(path)
    except ConfigError as error:
        text = str(error)
        assert text.replace("\n", "").isprintable() and len(text) < 45_000, f"message of {len(text)} characters"
        return "refused"
    check(policy)
    return "accepted"


def check(policy: Policy) -> None:
    """A policy that was read can be written, read again and resolved."""
    again = load_policy(read_yaml(policy_to_yaml(policy)).value)
    assert again == policy or "nan" in repr(policy)
    try:
        plan = resolve(policy, SITES, has_steps=True)
        plan.rows()
        plan.variants(9)
    except PolicyError:
        pass


def fuzz(first: int, end: int, until: float, found: dict[str, Any]) -> int:
    """Try the files first .. end - 1 until time.monotonic() is `until`; add to `found`. Returns where it stopped."""
    counts, failures = Counter(found["counts"]), found["failures"]
    before = signal.signal(signal.SIGALRM, alarm)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "configs" / "file.yaml"  # what run files name is beside it
        path.parent.mkdir()
        (Path(folder) / "tests").symlink_to(ROOT / "tests")
        (Path(folder) / "runs" / "terrain-unet").mkdir(parents=True)
        for number in range(first, end):
            if time.monotonic() > until:
                end = number
                break
            how, data, overrides, as_run = mutated(number)
            path.write_bytes(data)
            started = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            try:
                result = outcome(path, overrides, as_run)
            except Hang:
                result = "hang"
            except Exception as error:
                result = "internal error"
                failures.append({"file": number, "how": how, "error": f"{type(error).__name__}: {error}"[:300]})
                traceback.print_exc(limit=-3)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if result == "hang":
                failures.append({"file": number, "how": how, "error": "hang"})
            counts[result] += 1
            found["slowest_s"] = max(found["slowest_s"], round(time.monotonic() - started, 2))
    signal.signal(signal.SIGALRM, before)
    found["counts"], found["files"] = dict(sorted(counts.items())), end
    return end


def fresh() -> dict[str, Any]:
    return {"command": "", "seed": SEED, "limit_s": LIMIT_S, "files": 0, "counts": {}, "slowest_s": 0.0, "failures": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = fresh()
    if options.out and options.out.exists():
        found = json.loads(options.out.read_text())
    found["command"] = f"python scripts/fuzz_files.py --count {options.count} --out docs/results/fuzz_files.json"
    end = fuzz(found["files"], options.count, time.monotonic() + 60 * options.minutes, found)
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text if end == options.count else f"{text}\nstopped at file {end} of {options.count}; run it again to go on")
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
