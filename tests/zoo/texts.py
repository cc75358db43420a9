"""Text models: classifiers and causal language models of transformers, adapters of peft, and x-transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.zoo.rows import ZooRow, table

TOKENS = 12
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 50,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
BATCHED = {"experts_implementation": "batched_mm"}  # plain torch; the default is an operator of the library's own


class Text(nn.Module):
    """Tokens arrive as floats; a classifier's logits, or a language model's for the token after the last."""

    def __init__(self, body: nn.Module, *, last: bool) -> None:
        super().__init__()
        self.body, self.last = body, last

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x.long())
        logits: Tensor = out if isinstance(out, Tensor) else out.logits
        return logits[:, -1] if self.last else logits


def transformer(
    name: str,
    head: str,
    *,
    base: dict[str, Any] = SMALL,
    last: bool = False,
    **settings: Any,  # noqa: ANN401 - the library's own
) -> Callable[[], nn.Module]:
    """transformers' `NameHead` with the settings of its `NameConfig`."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}{'Text' if name.startswith('Gemma3') else ''}Config")(**base | settings)
        return Text(getattr(transformers, f"{name}{head}")(config), last=last)

    return make


def classifier(name: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """A classifier of whole texts."""
    return transformer(name, "ForSequenceClassification", **settings)


def causal(name: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """A causal language model with grouped attention where it has that."""
    return transformer(name, "ForCausalLM", last=True, **{"base": GROUPED} | settings)


def adapted(kind: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """A small Llama with adapters of peft; only these are trained."""

    def make() -> nn.Module:
        import peft
        import transformers

        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
        return Text(peft.get_peft_model(base, getattr(peft, kind)(**settings)), last=True)

    return make


def x_transformer(**settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """A decoder of x-transformers."""

    def make() -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **settings)
        return Text(TransformerWrapper(num_tokens=50, max_seq_len=TOKENS, attn_layers=layers), last=True)

    return make


CLASSIFIERS = {
    "BERT": classifier("Bert"),
    "RoBERTa": classifier("Roberta"),
    "ELECTRA": classifier("Electra", embedding_size=32),
    "ALBERT": classifier("Albert", embedding_size=16),
    "MobileBERT": classifier("MobileBert", embedding_size=16, intra_bottleneck_size=16),
    "DistilBERT": classifier(
        "DistilBert",
        base={"vocab_size": 50, "max_position_embeddings": 50, "num_labels": 3},
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
    ),
    "ModernBERT": classifier("ModernBert", cls_token_id=1, sep_token_id=2),
    "DeBERTa-v2": classifier("DebertaV2"),
    "DeBERTa": classifier("Deberta"),
    "XLM-RoBERTa": classifier("XLMRoberta"),
    "CamemBERT": classifier("Camembert"),
    "ERNIE": classifier("Ernie"),
    "MPNet": classifier("MPNet"),
    "SqueezeBERT": classifier("SqueezeBert", embedding_size=32),
    "ConvBERT": classifier("ConvBert", embedding_size=32),
    "RoFormer": classifier("RoFormer", embedding_size=32),
    "Nystromformer": classifier("Nystromformer", segment_means_seq_len=TOKENS, num_landmarks=4),
    "FNet": classifier("FNet", tpu_short_seq_length=TOKENS),
    "YOSO": classifier("Yoso", use_expectation=True),
    "I-BERT": classifier("IBert", quant_mode=False),
    "Funnel": classifier(
        "Funnel",
        base={"vocab_size": 50, "num_labels": 3},
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    ),
    "CANINE": classifier("Canine", num_hash_buckets=64, local_attention_window=4),
}
LANGUAGE_MODELS = {
    "GPT-2": transformer(
        "GPT2",
        "LMHeadModel",
        last=True,
        base={
            "vocab_size": 50,
            "n_positions": 50,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPT-NeoX": causal("GPTNeoX", base=SMALL),
    "GPT-Neo": causal(
        "GPTNeo",
        base={
            "vocab_size": 50,
            "max_position_embeddings": 50,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "OPT": causal(
        "OPT",
        base={
            "vocab_size": 50,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "ffn_dim": 64,
            "num_attention_heads": 4,
            "max_position_embeddings": 50,
            "word_embed_proj_dim": 32,
        },
    ),
    "BLOOM": causal("Bloom", base={"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Llama": causal("Llama"),
    "Mistral": causal("Mistral"),
    "Qwen2": causal("Qwen2"),
    "Qwen3": causal("Qwen3"),
    "Gemma": causal("Gemma"),
    "Gemma2": causal("Gemma2"),
    "Gemma3": causal("Gemma3"),
    "Phi": causal("Phi"),
    "Phi3": causal("Phi3"),
    "StableLM": causal("StableLm"),
    "Falcon": causal(
        "Falcon", base={"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ),
    "Cohere": causal("Cohere"),
    "Granite": causal("Granite"),
    "OLMo": causal("Olmo"),
    "OLMo2": causal("Olmo2"),
    "SmolLM3": causal("SmolLM3"),
    "StarCoder2": causal("Starcoder2"),
    "Helium": causal("Helium"),
    "Mamba": causal("Mamba", base={"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "Mamba2": causal(
        "Mamba2",
        base={
            "vocab_size": 50,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
    "LFM2": causal("Lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "Mixtral": causal("Mixtral", num_local_experts=2),
    "Mixtral, batched experts": causal("Mixtral", num_local_experts=2, **BATCHED),
    "GPT-OSS, batched experts": causal("GptOss", num_local_experts=4, num_experts_per_tok=2, **BATCHED),
    "DeepSeek-V3, batched experts": causal(
        "DeepseekV3",
        base=SMALL | BATCHED,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}
ADAPTERS = {
    "LoRA on Llama": adapted("LoraConfig", r=4, target_modules=["q_proj", "v_proj"]),
    "DoRA on Llama": adapted("LoraConfig", r=4, target_modules=["q_proj", "v_proj"], use_dora=True),
    "IA3 on Llama": adapted(
        "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoHa on Llama": adapted("LoHaConfig", r=4, target_modules=["q_proj", "v_proj"]),
    "LoKr on Llama": adapted("LoKrConfig", r=4, target_modules=["q_proj", "v_proj"]),
    "VeRA on Llama": adapted("VeraConfig", r=4, target_modules=["q_proj"]),
    "OFT on Llama": adapted("OFTConfig", oft_block_size=4, target_modules=["q_proj"]),
}
X_TRANSFORMERS = {
    "decoder": x_transformer(),
    "rotary, RMSNorm, SwiGLU": x_transformer(rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True, ff_glu=True),
    "ALiBi": x_transformer(alibi_pos_bias=True, alibi_num_heads=2),
    "T5 bias, sandwich norm": x_transformer(rel_pos_bias=True, sandwich_norm=True),
}


def rows() -> list[ZooRow]:
    """Rows of tokens."""
    return [
        *table("transformers", (TOKENS,), CLASSIFIERS | LANGUAGE_MODELS),
        *table("peft", (TOKENS,), ADAPTERS),
        *table("x-transformers", (TOKENS,), X_TRANSFORMERS),
    ]
