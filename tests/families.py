"""Tiny random checkpoints of the chat models that people fine-tune, made on the spot by transformers itself."""

from pathlib import Path

from tools import tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
          "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
         "mamba_chunk_size": 16}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14}  # fmt: skip

# name → (class of transformers, settings of its configuration beside SHAPE)
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 16}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE),
    "qwen3_next": ("Qwen3NextForCausalLM", {**MOE, **LINEAR, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5ForCausalLM", LINEAR),
    "phi3": ("Phi3ForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {
        "num_key_value_heads": 4, "head_dim": 8, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}),
    "gemma3_text": ("Gemma3ForCausalLM", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3": ("Gemma3ForConditionalGeneration", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {
        **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "position_embedding_type": "rope", "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25}),
    "nemotron_h": ("NemotronHForCausalLM", {
        "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "falcon_h1": ("FalconH1ForCausalLM", {**MAMBA, "mamba_d_ssm": 128}),
    "llama4": ("Llama4ForCausalLM", {"attention_chunk_size": 16, "intermediate_size_mlp": 96, "num_local_experts": 2,
        "num_experts_per_tok": 1, "moe_layers": [1], "pad_token_id": 0}),
}  # fmt: skip


def save(name: str, directory: Path, texts: list[str], seed: int = 0) -> Path:
    """Writes a random checkpoint of that family, fp32, with a byte-level tokenizer that speaks ChatML."""
    import torch
    import transformers

    directory.mkdir()
    tokenizer = tiny.save_tokenizer(directory, texts)
    model_class = getattr(transformers, FAMILIES[name][0])
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
           "bos_token_id": None}  # fmt: skip
    settings = {**SHAPE, "tie_word_embeddings": False, **ids, **FAMILIES[name][1]}
    if "text_config" in model_class.config_class.sub_configs:
        config = model_class.config_class(text_config=settings, vision_config=VISION, mm_tokens_per_image=4, **ids)
    else:
        config = model_class.config_class(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():  # larger than the usual start, so that losses differ from row to row
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else None
    model.save_pretrained(str(directory))
    return directory
