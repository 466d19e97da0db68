"""vLLM's side of `sampling.py --vllm`: the same cases, offline `LLM.generate` with log-probs.

Runs in a process of its own, with vLLM on its path. Weights are random (`load_format="dummy"`),
prompts are token ids, nothing is detokenized and no sequence ends early. The prefix cache is on, as
in its defaults, and reset before each timed run: every prompt is prefilled once, as on our side.

    python benchmarks/vllm_side.py --model qwen3-0.6b --cases CASES.json --out OUT.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import model_config
from vllm_packages import prepare_vllm_import
from workload import SEED


def make_llm(model: str, *, max_length: int, max_rows: int, folder: str) -> Any:
    prepare_vllm_import()
    from vllm import LLM

    model_config(model).save_pretrained(folder)
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max_length,
        max_num_seqs=max_rows,
        gpu_memory_utilization=0.85,
        seed=SEED,
    )


def measure_case(llm: Any, case: dict[str, Any], *, vocab_size: int) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    size = (case["prompts"], case["prompt_tokens"])
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(0, vocab_size, size, generator=generator).tolist()

    def generate(num_tokens: int) -> float:
        sampling = SamplingParams(
            n=case["samples"], temperature=1.0, max_tokens=num_tokens, min_tokens=num_tokens,
            ignore_eos=True, logprobs=0, detokenize=False,
        )  # fmt: skip
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling,
                               use_tqdm=False)  # fmt: skip
        seconds = time.perf_counter() - began
        samples = [sample for output in outputs for sample in output.outputs]
        assert all(len(sample.token_ids) == num_tokens for sample in samples)
        assert all(len(sample.logprobs) == num_tokens for sample in samples)
        return seconds

    generate(8)
    seconds = generate(case["new_tokens"])
    num_tokens = case["prompts"] * case["samples"] * case["new_tokens"]
    return {"seconds": seconds, "tokens_per_second": num_tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cases = json.loads(args.cases.read_text())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = make_llm(
            args.model,
            max_length=max(c["prompt_tokens"] + c["new_tokens"] for c in cases),
            max_rows=max(c["prompts"] * c["samples"] for c in cases),
            folder=folder,
        )
        import vllm

        result = {"vllm": vllm.__version__, "start_seconds": time.perf_counter() - began}
        rows: list[dict[str, Any]] = []
        vocab_size = model_config(args.model).vocab_size
        for case in cases:
            rows.append(measure_case(llm, case, vocab_size=vocab_size))
            print(args.model, case, rows[-1], flush=True)
            args.out.write_text(json.dumps({**result, "cases": rows}))


if __name__ == "__main__":
    main()
