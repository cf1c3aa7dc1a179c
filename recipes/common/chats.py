"""Conversations as a chat template renders them, and which part of their text is an answer."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from hf_dp.data.files import read_text
from hf_dp.errors import ConfigurationError

Message = dict[str, Any]


@dataclass(kw_only=True)
class ChatTemplate:
    """What recipes know that train on conversations."""

    chat_template: str | None = field(
        default=None, metadata={"help": "A Jinja file, in place of the tokenizer's own template."}
    )


def use_template(tokenizer: Any, recipe: Any) -> None:
    """Gives the tokenizer the recipe's own template, where it has one.

    Raises:
        ConfigurationError: neither has one.
    """
    if recipe.chat_template is not None:
        tokenizer.chat_template = read_text(recipe.chat_template)
    if tokenizer.chat_template is None:
        raise ConfigurationError(
            f"the tokenizer of {recipe.model} has no chat template.",
            why="it says how a conversation becomes text.",
            fix="give one: --chat_template FILE; or choose a model that was made for chat.",
        )


def tools_of(row: dict[str, Any]) -> list[Any] | None:
    """What a row's column `tools` offers to the assistant, as a list or as JSON.

    Raises:
        ConfigurationError: it is something else.
    """
    tools = row.get("tools") or None
    with contextlib.suppress(ValueError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise ConfigurationError(
            "tools are not a list, nor JSON of one.",
            why="the chat template tells the assistant of each.",
            fix="write a list of JSON schemas, or leave the column out.",
        )
    return tools or None


def rendered(
    messages: list[Message], first: int, tokenizer: Any, tools: list[Any] | None = None
) -> list[tuple[str, bool]]:
    """A conversation as text in parts, of which some are answers: an answer is what follows the generation prompt.

    White space after an answer belongs to what comes next. Found by rendering the conversation up to each answer, so
    that a template needs no `{% generation %}` marks. What the assistant opens a conversation with answers nothing.

    Args:
        first: answers before this message are not learnt.
        tools: that the assistant is told of.

    Raises:
        ConfigurationError: the template leaves out tools, or calls of them, or does not render the beginning of a
            conversation as it does the whole.
    """

    def render(part: list[Message], **options: Any) -> str:
        text: str = tokenizer.apply_chat_template(part, **{"tools": tools, **options}, tokenize=False)
        return text

    whole, parts, done = render(messages), [], 0
    without_calls = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    for what, is_there, without in (
        ("tools", tools, lambda: render(messages, tools=None)),
        ("calls of tools", any(message.get("tool_calls") for message in messages), lambda: render(without_calls)),
    ):
        if is_there and without() == whole:
            raise ConfigurationError(
                f"the chat template leaves out {what} that the rows have.",
                why="the model would learn answers without what they are answers to, or empty ones.",
                fix=f"give a template with a place for {what} (--chat_template FILE), or rows without them.",
            )
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < max(first, 1):
            continue
        prompt, answered = render(messages[:i], add_generation_prompt=True), render(messages[: i + 1])
        if not whole.startswith(answered):  # a template may end each text with it, not each answer (Phi-3's)
            answered = answered.removesuffix(tokenizer.eos_token or "")
        if not (answered.startswith(prompt) and whole.startswith(answered) and len(prompt) >= done):
            raise ConfigurationError(
                "the chat template renders the beginning of a conversation in another way than the whole.",
                why="the model would learn to answer something else than it is asked later.",
                fix="give a template that renders one message after the other: --chat_template FILE. For models that "
                "drop the thoughts of earlier turns (Qwen3), TRL's folder chat_templates has such ones.",
            )
        end = len(answered.rstrip())
        parts += [(whole[done : len(prompt)], False), (whole[len(prompt) : end], True)]
        done = max(len(prompt), end)
    return parts
