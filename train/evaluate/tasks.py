"""Prompts to evaluate on: JSONL files, rendered by the chat template the target will be served with.

`task_folder` finds the files of the public tasks, `converters` makes them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from train.data import QUICKSTART_PROMPTS
from train.data.files import Place, read_lines
from train.data.formats import Conversation, Message, RowRefused, parse_row
from train.evaluate.converters import SOURCES

#: Ends a conversation that has no answer yet, so that the training reader takes it; cut off again at once.
_PLACEHOLDER = {"role": "assistant", "content": ""}
#: Orders a task's rows before they are cut (dspark_spec 5.2).
ORDER_SEED = 980406

Render = Callable[[list[Message], list[dict] | None], str]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: unique in its set; with the seed it fixes the prompt's randomness.
        input_ids: int32 [T], the rendered conversation up to and including the generation prompt.
        text: the last message, for reports.
        task: name of the task it belongs to.
        index: its place in the task's order, counted from 0: DeepSpec's sample i.
        messages: the conversation that was rendered, its last message a user's or a tool's.
        tools: schemas offered with it.
        follow_ups: later user turns, to be asked after the answer (`PromptSet.next_turn`).
    """

    id: str
    input_ids: np.ndarray
    text: str = ""
    task: str = ""
    index: int = 0
    messages: tuple[Message, ...] = ()
    tools: list[dict] | None = None
    follow_ups: tuple[str, ...] = ()


@dataclass
class PromptSet:
    """Prompts of a file and what was left out of it.

    Attributes:
        prompts: in the file's order, or the task's.
        refused: (line number, reason) of every row that is no prompt.
        beyond_cap: rows of known tasks that are never asked, since as many as DeepSpec asks are others.
        render: how they were rendered: (messages, tools) -> text.
        tokenizer: the target's.
    """

    prompts: list[Prompt] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    beyond_cap: int = 0
    render: Render | None = None
    tokenizer: Any = None

    @property
    def unused_turns(self) -> int:
        """Later user turns of `turns` rows: only the first is asked (dspark_spec 5.1), unless `next_turn` is used."""
        return sum(len(prompt.follow_ups) for prompt in self.prompts)

    def summary(self, all_turns: bool = False) -> str:
        """What was left out: a line per reason with its count and first place. Empty when nothing was.

        Args:
            all_turns: later turns are asked too, so that none of them is left out.
        """
        counts = Counter(reason for _, reason in self.refused)
        first = {reason: line for line, reason in reversed(self.refused)}
        lines = [f"{count} row(s) refused: {reason} (first: line {first[reason]})" for reason, count in counts.items()]
        if self.beyond_cap:
            lines.append(
                f"{self.beyond_cap} row(s) beyond what DeepSpec asks of the task(s): a fixed random choice is asked"
            )
        if self.unused_turns and not all_turns:
            lines.append(f"{self.unused_turns} later user turn(s) not asked: a row of turns asks its first")
        return "\n".join(lines)

    def next_turn(self, answers: Mapping[str, str]) -> PromptSet:
        """The prompts' next user turns, each after the answer its conversation got so far.

        Args:
            answers: prompt id -> text of the answer, special tokens left out. Prompts without one (refused by
                the evaluation) have no next turn.
        """
        assert self.render is not None, "a set that was loaded from a file"
        found = PromptSet(render=self.render, tokenizer=self.tokenizer)
        for prompt in self.prompts:
            if not prompt.follow_ups or prompt.id not in answers:
                continue
            question, *later = prompt.follow_ups
            answer: Message = {"role": "assistant", "content": answers[prompt.id]}
            messages = [*prompt.messages, answer, {"role": "user", "content": question}]
            turn = sum(message["role"] == "user" for message in messages)
            ids = _tokenize(self.tokenizer, self.render(messages, prompt.tools))
            name = f"{prompt.id.removesuffix(f'#turn{turn - 1}')}#turn{turn}"
            found.prompts.append(
                Prompt(name, ids, question, prompt.task, prompt.index, tuple(messages), prompt.tools, tuple(later))
            )
        return found


def load_prompts(
    path: str | Path | None,
    tokenizer: Any,
    *,
    limit: int | None = None,
    template: str = "auto",
    enable_thinking: bool = False,
    task: str | None = None,
    cap: int | None = None,
) -> PromptSet:
    """Reads a JSONL file of prompts.

    A row is `{"turns": [str, ...]}`, of which the first turn is asked, or `{"messages" | "conversations":
    [...]}` in OpenAI's or ShareGPT's form, asked up to its last assistant turn. An `id` names the prompt,
    else its line does; a `task` says where its figures are counted, so one file can hold several tasks.

    Args:
        path: the file; None = the prompts shipped with the package.
        tokenizer: the target's.
        limit: at most this many prompts, from the start.
        template: auto = the tokenizer's own chat template, as a server uses it; else as `data.template`.
        enable_thinking: handed to templates that know the switch; False as in DeepSpec's evaluator.
        task: the name that prompts without one of their own carry; default: the file's name without suffix.
        cap: a file of more rows is shuffled (always the same way) and cut to so many. Whatever the limit, the
            prompts are a prefix of that order, so a small evaluation is part of the full one. None: a known
            task's (`converters.SOURCES`) where the file has its name, else all rows in the file's order.

    Raises:
        ValueError: the file cannot be read or holds no prompt, or there is no chat template.
    """
    path = QUICKSTART_PROMPTS if path is None else Path(path)
    if not path.is_file():
        raise ValueError(f"prompts file {path} does not exist")
    render = _renderer(tokenizer, template, enable_thinking)
    found = PromptSet(render=render, tokenizer=tokenizer)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    task = task or name
    if cap is None and name in SOURCES:
        cap = SOURCES[name].cap
    rows: Iterable[tuple[Place, bytes]] = read_lines(path.parent, [path.name])
    if cap is not None:
        listed = list(rows)
        found.beyond_cap = max(0, len(listed) - cap)
        rows = ordered_rows(listed, cap)
    taken: set[str] = set()
    for index, (place, line) in enumerate(rows):
        if limit is not None and len(found.prompts) >= limit:
            break
        try:
            conversation, follow_ups, own_task = _read_row(line, place)
            text = render(conversation.messages, conversation.tools)
        except RowRefused as refused:
            found.refused.append((place.line, refused.reason))
            continue
        name = conversation.id
        if name in taken:
            name = f"{name}#{place.line}"  # two prompts must not share their randomness
        taken.add(name)
        asked = conversation.messages
        ids = _tokenize(tokenizer, text)
        found.prompts.append(
            Prompt(
                name, ids, asked[-1]["content"], own_task or task, index, tuple(asked), conversation.tools, follow_ups
            )
        )
    if not found.prompts:
        what = f": {found.summary()}" if found.refused else ", it has no rows"
        raise ValueError(f"prompts file {path} holds no prompt{what}")
    return found


def ordered_rows(rows: Sequence[tuple[Place, bytes]], cap: int) -> Sequence[tuple[Place, bytes]]:
    """The rows in the order they are asked: the file's, or shuffled and cut where there are more than `cap`.

    DeepSpec shuffles a file that is longer than what it asks of it (dspark_spec 5.2); a list of equal length is
    always permuted equally, so the same file gives the same prompts.
    """
    ordered = list(rows)
    if len(ordered) > cap:
        random.Random(ORDER_SEED).shuffle(ordered)
    return ordered[:cap]


def _tokenize(tokenizer: Any, text: str) -> np.ndarray:
    """int32 [T]; the template wrote the special tokens already."""
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _read_row(line: bytes, place: Place) -> tuple[Conversation, tuple[str, ...], str]:
    """The conversation up to what is asked, the later user turns it leaves unasked, and the row's own task."""
    row, follow_ups, task = _with_answer(line)
    conversation = parse_row(row, place, vocab_size=0)
    if not isinstance(conversation, Conversation):
        raise RowRefused("row of token ids, not a prompt")
    messages = conversation.messages
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    asked = messages[:last]
    if not asked or asked[-1]["role"] not in ("user", "tool"):
        raise RowRefused("no user turn before the last assistant turn")
    if not asked[-1]["content"].strip():
        raise RowRefused("empty prompt")
    return Conversation(conversation.id, place, asked, conversation.tools), follow_ups, task


def _with_answer(line: bytes) -> tuple[bytes, tuple[str, ...], str]:
    """The row in a form the training reader takes: `turns` as messages, and an answer at the end."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return line, (), ""  # the reader says what is wrong with it
    if not isinstance(row, dict):
        return line, (), ""
    follow_ups: tuple[str, ...] = ()
    task = row.get("task") or ""
    if not isinstance(task, str):
        raise RowRefused("task is not a string")
    if row.get("turns") is not None:
        turns = row.pop("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise RowRefused("turns are not a list of strings")
        row["messages"] = [{"role": "user", "content": turns[0]}]
        follow_ups = tuple(turns[1:])
    for key in ("messages", "conversations"):
        turns = row.get(key)
        if isinstance(turns, list) and turns and not _is_assistant(turns[-1]):
            row[key] = [*turns, _PLACEHOLDER]
    return json.dumps(row).encode(), follow_ups, task


def _is_assistant(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    return message.get("role") == "assistant" or message.get("from") in ("gpt", "assistant")


def _renderer(tokenizer: Any, template: str, enable_thinking: bool) -> Render:
    """(messages, tools) -> text ending in the generation prompt."""
    if template == "auto" and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template; name one with eval.template (--template), "
            "as data.template does"
        )

    def own(messages: list[Message], tools: list[dict] | None) -> str:
        source = tokenizer.get_chat_template(tools=tools)
        switch = {"enable_thinking": enable_thinking} if "enable_thinking" in source else {}
        try:
            return tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **switch
            )
        except Exception as error:  # a template is a program of others: whatever it raises is its refusal
            raise RowRefused("refused by the chat template", str(error)) from error

    def named(messages: list[Message], tools: list[dict] | None) -> str:
        try:
            return chosen.render(messages, tools, prompt=True).text
        except RenderError as error:
            raise RowRefused("refused by the chat template", str(error)) from error

    if template == "auto":
        return own
    from train.data.agreement import template_variables
    from train.data.templates import RenderError, read_template

    chosen = read_template(template, template_variables(tokenizer, None))
    if "enable_thinking" in chosen.source:
        chosen = read_template(template, template_variables(tokenizer, enable_thinking))
    return named
