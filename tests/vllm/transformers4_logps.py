"""Runs in .venv-transformers4: log-probs of prompts by a model folder, or by an adapter on a base.

python transformers4_logps.py FOLDER [BASE] < prompts.json
"""

from __future__ import annotations

import json
import sys

import torch
import transformers


def main(folder: str, base: str | None = None) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    request = json.load(sys.stdin)
    logps = []
    for ids in request["prompts"]:
        ids_T = torch.tensor(ids)
        with torch.no_grad():
            logp_TV = model.eval()(input_ids=ids_T[None]).logits[0].log_softmax(-1)
        logps.append(logp_TV[:-1].gather(-1, ids_T[1:, None])[:, 0].tolist())
    json.dump(
        {
            "version": transformers.__version__,
            "logps": logps,
            "ids": [tokenizer(text)["input_ids"] for text in request["texts"]],
            "chat": tokenizer.apply_chat_template(
                [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
            ),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
