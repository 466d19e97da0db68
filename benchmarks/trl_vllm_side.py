"""`trl_gpu_side.py` with rollouts by vLLM in TRL's process (`vllm_mode="colocate"`)."""

from __future__ import annotations

from vllm_packages import prepare_vllm_import

if __name__ == "__main__":
    prepare_vllm_import()
    from trl_gpu_side import main

    main(use_vllm=True)
