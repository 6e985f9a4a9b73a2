"""A tokenizer, a model and rows that are real in kind and tiny in size, made on the spot without a network."""

import json
import random
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tokenizer(directory: Path, texts: list[str], vocab_size: int = 600):
    """A byte-level BPE tokenizer with ChatML, trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def save_model(directory: Path, tokenizer, hidden_size: int = 64, layers: int = 2, seed: int = 0):
    """A random Qwen2 with grouped-query attention for that tokenizer, fp32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        attn_implementation="eager",  # transformers 4.55 asks its default, sdpa, of torch 2.1.1
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # larger than the usual start, so that losses differ from row to row
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else None
    model.save_pretrained(str(directory))
    return model


def make_rows(count: int, seed: int = 7) -> list[dict]:
    """Question–answer rows of very different lengths, in English and Chinese."""
    draw = random.Random(seed)
    words = [
        "rank",
        "step",
        "gradient",
        "card",
        "memory",
        "loss",
        "adapter",
        "token",
        "batch",
        "epoch",
        "梯度",
        "显存",
        "通信",
        "训练",
        "模型",
    ]
    return [
        {
            "question": f"Question {i}: {' '.join(draw.choices(words, k=draw.randint(1, 8)))}?",
            "answer": " ".join(draw.choices(words, k=int(1 + draw.expovariate(0.12)))) + ".",
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
