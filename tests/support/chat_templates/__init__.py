"""The chat templates that most models have, written anew from what is public about their formats.

Each `.jinja` file begins with a line that says which models it is of and which facts it has. Texts
that a template adds (default system prompts, how to call tools) are short stand-ins. Tokenizers are
tiny: one token a byte, and the tokens that the format needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.tiny_model import tiny_tokenizer

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate

FOLDER = Path(__file__).parent
DEFAULT_BOS, DEFAULT_EOS = "<|im_start|>", "<|im_end|>"
THINK = ("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    models: str
    """What has this template, for the documentation."""
    special: tuple[str, ...] = ()
    """Special tokens that the format uses, besides ChatML's."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special, so that a text may have them."""
    bos: str = DEFAULT_BOS
    eos: tuple[str, ...] = (DEFAULT_EOS,)
    """Tokens that the model stops at; the first is the tokenizer's."""
    thinking: tuple[str, str] | None = None
    """How the model begins and ends its thoughts, where that is plain text."""


LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
V7 = (*MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
COHERE = (
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)
GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
GLM = (
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|endoftext|>",
)
GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
THOUGHT = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")


def _chatml(models: str, *added: str, thinking: bool = False) -> Family:
    return Family(
        models=models,
        special=("<|endoftext|>",),
        added=(*added, *(THOUGHT if thinking else ())),
        thinking=THINK if thinking else None,
    )


def _llama3(models: str) -> Family:
    return Family(models=models, special=LLAMA3, bos=LLAMA3[0], eos=("<|eot_id|>",))


def _mistral(models: str, *special: str) -> Family:
    return Family(models=models, special=special or MISTRAL, bos="<s>", eos=("</s>",))


def _deepseek(models: str, thinking: tuple[str, str] | None = None) -> Family:
    return Family(
        models=models,
        special=DEEPSEEK,
        added=THOUGHT,
        bos=DEEPSEEK[0],
        eos=(DEEPSEEK[1],),
        thinking=thinking,
    )


FAMILIES = {
    "llama2": _mistral("Llama 2"),
    "llama3": _llama3("Llama 3"),
    "llama3.1": _llama3("Llama 3.1, 3.3"),
    "llama3.2": _llama3("Llama 3.2"),
    "llama4": Family(
        models="Llama 4",
        bos="<|begin_of_text|>",
        eos=("<|eot|>",),
        special=("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
    ),
    "chatml": _chatml("ChatML: Yi, InternLM, many fine-tunes"),
    "hermes3": Family(
        models="Hermes 2 Pro, Hermes 3",
        special=("<|begin_of_text|>",),
        added=CALLS,
        bos="<|begin_of_text|>",
    ),
    "qwen2": _chatml("Qwen2"),
    "qwen2.5": _chatml("Qwen2.5", *CALLS),
    "qwen3": _chatml("Qwen3", *CALLS, thinking=True),
    "qwen3-instruct-2507": _chatml("Qwen3-Instruct-2507, Qwen3-Next", *CALLS),
    "qwen3-thinking-2507": _chatml("Qwen3-Thinking-2507", *CALLS, thinking=True),
    "qwen3-coder": _chatml("Qwen3-Coder", *CALLS),
    "qwen3.5": _chatml("Qwen3.5", *CALLS, thinking=True),
    "gemma2": Family(models="Gemma, Gemma 2", special=GEMMA, bos="<bos>", eos=("<end_of_turn>",)),
    "gemma3": Family(models="Gemma 3", special=GEMMA, bos="<bos>", eos=("<end_of_turn>",)),
    "gemma4": Family(
        models="Gemma 4",
        bos="<bos>",
        eos=("<turn|>", "<|tool_response>"),
        special=(
            "<bos>",
            "<|turn>",
            "<turn|>",
            "<|think|>",
            "<|channel>",
            "<channel|>",
            "<|tool>",
            "<tool|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
        ),
    ),
    "mistral-v1": _mistral("Mistral v0.1, v0.2, Mixtral"),
    "mistral-v3": _mistral("Mistral v0.3, Nemo"),
    "mistral-v7-tekken": _mistral("Mistral Small 3, 3.1, 3.2", *V7),
    "magistral": _mistral("Magistral", *V7, "[THINK]", "[/THINK]"),
    "phi3": Family(
        models="Phi-3, Phi-3.5", special=PHI, bos="<|endoftext|>", eos=("<|endoftext|>", "<|end|>")
    ),
    "phi4": Family(models="Phi-4", special=("<|im_sep|>", "<|endoftext|>"), bos="<|endoftext|>"),
    "phi4-mini": Family(
        models="Phi-4-mini",
        bos="<|endoftext|>",
        eos=("<|endoftext|>", "<|end|>"),
        special=(
            *PHI,
            "<|tool|>",
            "<|/tool|>",
            "<|tool_call|>",
            "<|/tool_call|>",
            "<|tool_response|>",
        ),
    ),
    "gpt-oss": Family(
        models="gpt-oss",
        bos="<|startoftext|>",
        eos=("<|return|>", "<|call|>"),
        special=(
            "<|startoftext|>",
            "<|start|>",
            "<|message|>",
            "<|channel|>",
            "<|end|>",
            "<|return|>",
            "<|call|>",
        ),
    ),
    "deepseek-v2": _deepseek("DeepSeek V2, V2.5"),
    "deepseek-v3": _deepseek("DeepSeek V3"),
    "deepseek-r1": _deepseek("DeepSeek R1 and distillations", THINK),
    "deepseek-v3.1": _deepseek("DeepSeek V3.1", ("<think>", "</think>")),
    "granite3": Family(
        models="Granite 3.1–3.3",
        special=(*GRANITE, "<|tool_call|>"),
        bos="<|end_of_text|>",
        eos=("<|end_of_text|>",),
    ),
    "granite4": Family(
        models="Granite 4",
        special=GRANITE,
        added=CALLS,
        bos="<|end_of_text|>",
        eos=("<|end_of_text|>",),
    ),
    "olmo2": Family(
        models="OLMo 2, Tülu 3",
        special=("<|endoftext|>",),
        bos="<|endoftext|>",
        eos=("<|endoftext|>",),
    ),
    "olmo3": Family(
        models="OLMo 3 Instruct",
        special=("<|endoftext|>",),
        bos="<|endoftext|>",
        eos=("<|endoftext|>", "<|im_end|>"),
    ),
    "olmo3-think": Family(
        models="OLMo 3 Think",
        special=("<|endoftext|>",),
        bos="<|endoftext|>",
        eos=("<|endoftext|>", "<|im_end|>"),
        thinking=("<think>", "</think>"),
    ),
    "smollm2": _chatml("SmolLM2"),
    "smollm3": _chatml("SmolLM3", *CALLS, thinking=True),
    "zephyr": Family(
        models="Zephyr, StableLM 2, TinyLlama", special=("<s>", "</s>"), bos="<s>", eos=("</s>",)
    ),
    "command-r": Family(
        models="Command R, Aya", special=COHERE, bos="<BOS_TOKEN>", eos=("<|END_OF_TURN_TOKEN|>",)
    ),
    "command-r7b": Family(
        models="Command R7B",
        bos="<BOS_TOKEN>",
        eos=("<|END_OF_TURN_TOKEN|>",),
        special=(
            *COHERE,
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|START_TOOL_RESULT|>",
            "<|END_TOOL_RESULT|>",
        ),
    ),
    "falcon3": Family(models="Falcon 3", special=("<|endoftext|>",), eos=("<|endoftext|>",)),
    "falcon-h1": Family(
        models="Falcon-H1", special=("<|begin_of_text|>",), added=CALLS, bos="<|begin_of_text|>"
    ),
    "glm4": Family(
        models="GLM-4",
        special=GLM,
        bos="<|endoftext|>",
        eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "glm4.5": Family(
        models="GLM-4.5, 4.6",
        special=GLM,
        added=(*THOUGHT, *CALLS),
        bos="<|endoftext|>",
        eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
        thinking=("\n<think>", "</think>\n"),
    ),
    "nemotron-nano-v2": Family(
        models="Nemotron Nano v2",
        bos="<s>",
        eos=("<SPECIAL_12>",),
        special=("<s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        thinking=THINK,
    ),
    "kimi-k2": Family(
        models="Kimi K2",
        bos="[BOS]",
        special=(
            "[BOS]",
            "<|im_system|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "minimax-m2": Family(
        models="MiniMax M2",
        special=("]~!b[", "]~b]", "[e~["),
        added=THOUGHT,
        bos="]~!b[",
        eos=("[e~[",),
        thinking=THINK,
    ),
    "lfm2": Family(
        models="LFM2",
        bos="<|startoftext|>",
        special=(
            "<|startoftext|>",
            "<|tool_list_start|>",
            "<|tool_list_end|>",
            "<|tool_call_start|>",
            "<|tool_call_end|>",
            "<|tool_response_start|>",
            "<|tool_response_end|>",
        ),
    ),
}


def family_source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def family_tokenizer(name: str) -> Any:
    family = FAMILIES[name]
    special = [t for t in family.special if t not in (DEFAULT_BOS, DEFAULT_EOS)]
    tokenizer = tiny_tokenizer(template=family_source(name), extra=(*special, *family.added))
    tokenizer.add_tokens(list(family.added))
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.bos_token, tokenizer.eos_token = family.bos, family.eos[0]
    return tokenizer


@cache
def family_template(name: str, **args: Any) -> IncrementalTemplate:
    tokenizer = family_tokenizer(name)
    eos_ids = tokenizer.convert_tokens_to_ids(list(FAMILIES[name].eos))
    return IncrementalTemplate(ChatTemplate(tokenizer, name=name, eos_ids=eos_ids, args=args))
