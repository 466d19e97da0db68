"""Chat templates of the kinds that exist, and tokenizers that merge where it hurts."""

from __future__ import annotations

from functools import cache

from support.tiny_model import TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate

OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

HEADERS = (  # a start of text, headers, trimmed contents, no line break behind the end token
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|header|>' + m['role'] + '<|/header|>\n\n' "
    "+ m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
TRIMMING = TEMPLATE.replace("m['content']", "m['content'] | trim")
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe of use.<|im_end|>\n' }}"
    "{% endif %}" + TEMPLATE
)
NO_BREAKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ':' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
THINKING = (  # thinking only behind the last question, tool results together in a user's message
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + text + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + text }}"
    "{% for call in m['tool_calls'] or [] %}{{ '\n<tool_call>\n' + call['function']['name'] + ' ' "
    "+ call['function']['arguments'] | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}" + OPEN
)
PLAIN_ROLES = (  # no special tokens but the end of an answer: everything may merge
    "{% for m in messages %}{{ '\n' + m['role'] + ':\n' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nassistant:\n' }}{% endif %}"
)
OPENS_THINKING = TEMPLATE.replace(OPEN, OPEN.replace("assistant\n", "assistant\n<think>\n"))
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + TEMPLATE
)
NO_TOOLS = TEMPLATE.replace(
    "{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}"
)
SYSTEM_FIRST = (
    "{% for m in messages if m['role'] == 'system' %}"
    "{{ '<|im_start|>system\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    + TEMPLATE.replace("in messages %}", "in messages if m['role'] != 'system' %}", 1)
)

FAMILIES = {
    "chatml": TEMPLATE,
    "headers": HEADERS,
    "trimming": TRIMMING,
    "default_system": DEFAULT_SYSTEM,
    "no_breaks": NO_BREAKS,
    "thinking": THINKING,
    "words": PLAIN_ROLES,
}
"""That take all roles in any order."""

MERGES = {
    "bytes": ((), True),
    "breaks": ((("Ċ", "Ċ"), ("Ċ", "Ġ"), ("ĊĊ", "Ċ")), True),
    # Full stops, braces and letters with the line breaks behind or before them.
    "greedy": (
        (
            ("Ċ", "Ċ"), (".", "ĊĊ"), (".", "Ċ"), ("}", "Ċ"), ("}", "ĊĊ"), ("s", "Ċ"), ("Ċ", "H"),
            ("Ġ", "H"), (".", "Ġ"), ("t", "s"), (":", "Ċ"), ("Ã", "©"), ("e", "Ċ"), ("ĊĊ", "H"),
        ),
        False,
    ),
}  # fmt: skip
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>")
ENDS = {"headers": "<|eot|>"}


def tokenizer_for(template: str, merges: str = "bytes") -> PreTrainedTokenizerFast:
    pairs, use_regex = MERGES[merges]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*SPECIAL, *alphabet, *(first + second for first, second in pairs)]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=list(pairs)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = template
    return tokenizer


@cache
def template_of_family(family: str, merges: str = "bytes") -> IncrementalTemplate:
    return make_template(FAMILIES[family], merges, end=ENDS.get(family, "<|im_end|>"))


def make_template(
    template: str, merges: str = "bytes", *, end: str = "<|im_end|>"
) -> IncrementalTemplate:
    tokenizer = tokenizer_for(template, merges)
    end_id = tokenizer.convert_tokens_to_ids(end)
    return IncrementalTemplate(ChatTemplate(tokenizer, name="tiny", eos_ids=[end_id]))


TOOLS_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n"
    "{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{% if not (loop.first and m.role == 'system') %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Renders tool schemas in the system message, and calls after the text of a message."""

HERMES_TEMPLATE = TOOLS_TEMPLATE.replace(
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>",
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>",
)
"""The same with calls as Hermes and Qwen2.5 write them."""
