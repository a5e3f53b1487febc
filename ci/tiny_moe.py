"""Write a tiny Qwen3-MoE checkpoint with random weights, and a tokenizer for it, without any network.

The demo needs a model whose routed experts are worth moving (24 layers, top-8 of 64 experts: 192 ids a token) but
whose forward pass is cheap on two cores. Everything comes from one fixed seed, so two runs serve the same weights.

Usage: ``python ci/tiny_moe.py DIRECTORY``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS = 24
EXPERTS = 64
TOPK = 8
MAX_POSITIONS = 8192
SEED = 20251017

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# One turn is <|im_start|>role\ncontent<|im_end|>\n, as the Qwen family lays it out. Nothing is added for the caller.
_CHAT_TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{{ turn['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> int:
    """Write a byte-level tokenizer without merges: one token per byte of text. Returns the vocabulary size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(directory)
    return len(wrapped)


def qwen3_moe(*, layers: int = LAYERS, experts: int = EXPERTS, **tokens: Any) -> Any:
    """The config of a Qwen3-MoE, top-8 of ``experts`` in each layer.

    Args:
        layers: How many.
        experts: Of a layer.
        tokens: ``vocab_size``, ``eos_token_id`` and ``pad_token_id``.
    """
    from transformers import Qwen3MoeConfig

    fields: dict[str, Any] = dict(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=TOPK,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        # Far wider than the usual 0.02: with it the model's greedy output varies instead of repeating one token.
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
    )
    return Qwen3MoeConfig(**fields, **tokens)


def write_checkpoint(
    directory: Path, config: Callable[..., Any], *, adjust: Callable[[Any], None] = lambda model: None
) -> int:
    """Write tokenizer, config and random weights from :data:`SEED`, as bfloat16. Returns the vocabulary size.

    Args:
        directory: Made if it is not there.
        config: From ``vocab_size``, ``eos_token_id`` and ``pad_token_id``, as :func:`qwen3_moe`.
        adjust: Changes the weights before they are written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(SEED)
    model: Any = AutoModelForCausalLM.from_config(config(vocab_size=vocab_size, **ends), dtype=torch.float32)
    adjust(model)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(**ends, do_sample=False)
    model.save_pretrained(directory)
    return vocab_size


def main(argv: list[str]) -> None:
    """Write the checkpoint into the directory named on the command line."""
    if len(argv) != 1:
        raise SystemExit(__doc__)
    directory = Path(argv[0])
    vocab_size = write_checkpoint(directory, qwen3_moe)
    size_mib = sum(file.stat().st_size for file in directory.iterdir()) / 2**20
    print(f"{directory}: {LAYERS} layers, {EXPERTS} experts, top-{TOPK}, vocabulary {vocab_size}, {size_mib:.0f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
