"""Makes the quickstart's conversations and held-out prompts (train/data/quickstart) from a file of answered
prompts.

    python examples/make_quickstart_data.py CONVERSATIONS.jsonl.gz --tokenizer FOLDER [--out
    train/data/quickstart]

The input holds rows {"id", "source", "conversations": [user, assistant]} whose answers were sampled from the
small target. Only sources whose prompts are templates of this project, filled with numbers, words or
Wikipedia titles, are taken. The same input gives the same rows in the same order, whatever the machine.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("math_template", "code_template", "wiki_title")
#: The task under which a held-out prompt's figures are counted.
TASKS = {"math_template": "math", "code_template": "code", "wiki_title": "chat"}
PER_SOURCE = 534
PROMPTS = 64
SEED = 980406
MIN_ANSWER_TOKENS = 40
# Answers were sampled up to 320 tokens; one that long was cut, not ended. A cut text may encode a little
# shorter.
MAX_ANSWER_TOKENS = 309

NAMES = (
    "Anna", "Ben", "Carlos", "Dina", "Emma", "Farid", "Grace", "Hugo", "Ivy", "Jamal",
    "Kim", "Liam", "Maya", "Noah", "Olga", "Priya", "Quinn", "Rosa", "Sam", "Tara",
)  # fmt: skip
ITEMS = (
    "apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "marbles", "oranges", "pencils",
    "shells", "stamps", "stickers", "tickets", "toy cars",
)  # fmt: skip
MATH = (
    "A train travels {a} km in {c} hours and then {b} km in 2 hours. What is its average speed over the whole trip?",
    "{x} reads {c} pages a day and {y} reads {b} pages a day. After {a} days, how many pages have they read together?",
    "{x} buys {c} boxes with {b} {items} in each box. {y} takes away {taken} of them. How many {items} are left?",
    "A shop sells {items} for ${c} each. {x} buys {a} of them and pays with a ${paid} voucher. "
    "How much money is left on the voucher?",
    "{x} has {a} {items}. {y} gives {x} {b} more, and then {x} shares all of them equally among {c} friends. "
    "How many does each friend get, and how many are left over?",
    "{x} sold {even} {items} on Monday and half as many on Tuesday. "
    "{y} sold {b} more than {x} did on both days. How many did {y} sell?",
)
WIKI = (
    "What is {}?",
    "Tell me about {}.",
    "Explain {} to a ten year old.",
    "Why is {} important?",
    "Summarise what you know about {} in bullet points.",
    "Give me five interesting facts about {}.",
    "What are common misconceptions about {}?",
    "Write a short paragraph about {}.",
    "Write a short quiz of three questions about {}, with answers.",
    "How would you introduce {} in a classroom lesson?",
)
# A small model invents what it says; on these subjects inventions are not for a package to spread.
UNFIT = re.compile(
    r"abus|bomb|crime|dead|death|execut|fascis|genocid|hate|hitler|holocaust|jihad|kidnap|laden|lynch|massacr|molest|"
    r"murder|naked|nazi|nude|pedoph|porn|pogrom|prostitut|racis|rape\b|rapist|sex|shooting|slave|stalin|suicid|"
    r"supremac|terroris|tortur",
    re.IGNORECASE,
)
CODE = re.compile(r"Write a (?P<language>\S+) function to (?P<task>[^.]+)\.(?: (?P<wish>.+\.))?")
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Row:
    """One answered prompt."""

    id: str
    source: str
    prompt: str
    answer: str


def read(path: Path) -> list[Row]:
    """Rows of the wanted sources, in the order of the file."""
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            raw = json.loads(line)
            if raw["source"] not in SOURCES:
                continue
            user, assistant = raw["conversations"]
            if (user["role"], assistant["role"]) != ("user", "assistant"):
                raise ValueError(f"row {raw['id']} is not one question and one answer")
            rows.append(Row(raw["id"], raw["source"], user["content"], assistant["content"]))
    return rows


def by_hash(rows: Iterable[Row]) -> list[Row]:
    """An order that depends on the ids alone: not on the file's order, nor on any library's random
    numbers."""
    return sorted(rows, key=lambda row: hashlib.sha256(f"{SEED} {row.id}".encode()).digest())


def select(rows: Iterable[Row], answer_tokens: Callable[[str], int], per_source: int = PER_SOURCE) -> list[Row]:
    """The same number of every source: answers that end by themselves, are long enough and fit to be passed
    on.

    Raises:
        ValueError: a source has too few such rows.
    """
    chosen = []
    for source in SOURCES:
        taken: list[Row] = []
        prompts: set[str] = set()
        for row in by_hash(row for row in rows if row.source == source):
            if len(taken) == per_source:
                break
            fits = MIN_ANSWER_TOKENS <= answer_tokens(row.answer) <= MAX_ANSWER_TOKENS
            if fits and row.prompt not in prompts and not UNFIT.search(f"{row.prompt} {row.answer}"):
                prompts.add(row.prompt)
                taken.append(row)
        if len(taken) < per_source:
            raise ValueError(f"source {source} has {len(taken)} rows that fit, {per_source} are needed")
        chosen += taken
    return by_hash(chosen)


def question_key(prompt: str) -> tuple[str, ...]:
    """What makes a question the same question: its template and its filling, whatever it asks for in
    addition.

    Code questions: language and task (not the wish for comments or tests). Others: the words and numbers; for
        sums
    the names and things in them do not matter.
    """
    code = CODE.fullmatch(prompt)
    if code:
        return ("code", code["language"], code["task"])
    if prompt.endswith("Think step by step."):
        skeleton = NUMBER.sub("#", prompt)
        for word in (*ITEMS, *NAMES):
            skeleton = re.sub(rf"\b{word}\b", "_", skeleton)
        return ("math", skeleton, *NUMBER.findall(prompt))
    return ("wiki", prompt)


def held_out_prompts(rows: list[Row], chosen: list[Row], count: int = PROMPTS) -> list[tuple[str, str]]:
    """New questions in the style of the sources, as (source, prompt).

    None asks what any row of the file asks (`question_key`), so they are held out from a training on the
    whole file too; a title asked about does not occur in any chosen prompt.
    """
    rng = random.Random(SEED)
    asked = {question_key(row.prompt) for row in rows}
    makers = {
        "math_template": _math_maker(rng),
        "code_template": _code_maker(rng, [row.prompt for row in rows if row.source == "code_template"]),
        "wiki_title": _wiki_maker(rng, rows, chosen),
    }
    prompts: list[tuple[str, str]] = []
    while len(prompts) < count:
        source = SOURCES[len(prompts) % len(SOURCES)]
        prompt = makers[source]()
        if question_key(prompt) not in asked:
            asked.add(question_key(prompt))
            prompts.append((source, prompt))
    return prompts


def _math_maker(rng: random.Random) -> Callable[[], str]:
    def make() -> str:
        a, b, c = rng.randint(3, 90), rng.randint(2, 30), rng.randint(2, 12)
        x, y = rng.sample(NAMES, 2)
        filling = {
            "a": a, "b": b, "c": c, "x": x, "y": y, "items": rng.choice(ITEMS), "even": 2 * a,
            "taken": rng.randint(1, b * c - 1), "paid": a * c + rng.randint(1, 90),
        }  # fmt: skip
        return rng.choice(MATH).format(**filling) + " Think step by step."

    return make


def _code_maker(rng: random.Random, prompts: list[str]) -> Callable[[], str]:
    parts = [match for match in map(CODE.fullmatch, prompts) if match]
    languages, tasks = (sorted({match[name] for match in parts}) for name in ("language", "task"))
    wishes = sorted({match["wish"] for match in parts if match["wish"]})

    def make() -> str:
        prompt = f"Write a {rng.choice(languages)} function to {rng.choice(tasks)}."
        wish = rng.choice(["", *wishes])
        return f"{prompt} {wish}".rstrip()

    return make


def _wiki_maker(rng: random.Random, rows: list[Row], chosen: list[Row]) -> Callable[[], str]:
    patterns = [re.compile(re.escape(template).replace(re.escape("{}"), "(.+)")) for template in WIKI]
    prompts = [row.prompt for row in rows if row.source == "wiki_title"]
    found = (pattern.fullmatch(prompt) for prompt in prompts for pattern in patterns)
    titles = {match[1] for match in found if match}
    shown = "\n".join(row.prompt for row in chosen)
    fresh = sorted(title for title in titles if title not in shown and not UNFIT.search(title))

    def make() -> str:
        return rng.choice(WIKI).format(rng.choice(fresh))

    return make


def write_conversations(rows: list[Row], path: Path) -> None:
    """One conversation a line, compressed without a time stamp or a file name in the header."""
    lines = []
    for row in rows:
        turns = [{"role": "user", "content": row.prompt}, {"role": "assistant", "content": row.answer}]
        lines.append(json.dumps({"id": row.id, "messages": turns}, ensure_ascii=False, separators=(",", ":")) + "\n")
    path.write_bytes(gzip.compress("".join(lines).encode("utf-8"), compresslevel=9, mtime=0))


def write_prompts(prompts: list[tuple[str, str]], path: Path) -> None:
    """One prompt a line, in the form of the evaluation sets: {"id", "task", "turns": [question]}."""
    lines = [
        json.dumps({"id": f"{source}-held-out-{i}", "task": TASKS[source], "turns": [prompt]}, ensure_ascii=False)
        + "\n"
        for i, (source, prompt) in enumerate(prompts)
    ]
    path.write_text("".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", type=Path, help="the answered prompts, .jsonl.gz")
    parser.add_argument("--tokenizer", required=True, help="folder or hub name of the target, to count tokens")
    default = Path(__file__).resolve().parent.parent / "train" / "data" / "quickstart"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(arguments)

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    rows = read(options.conversations)
    chosen = select(rows, lambda answer: len(tokenizer(answer, add_special_tokens=False)["input_ids"]))
    prompts = held_out_prompts(rows, chosen)
    options.out.mkdir(parents=True, exist_ok=True)
    write_conversations(chosen, options.out / "conversations.jsonl.gz")
    write_prompts(prompts, options.out / "prompts.jsonl")
    for name in ("conversations.jsonl.gz", "prompts.jsonl"):
        print(f"{options.out / name}: {(options.out / name).stat().st_size:,} bytes")
    print(f"{len(chosen)} conversations, {len(prompts)} prompts")


if __name__ == "__main__":
    main()
